"""Replicas as Ray Serve runs them, as processes of their own and without Serve."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import msgspec

from fabric_ray.serve.completions import Completions
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.engines import Role
from fabric_ray.serve.errors import NoPrefill
from fabric_ray.serve.instance import Instance, tokenizer
from fabric_ray.serve.messages import Emitted, Failed, Generate
from fabric_ray.serve.prefill_loop import PrefillLoop
from fabric_ray.serve.prefillers import PrefillerOffer, least_loaded

T = TypeVar("T")


class Order(msgspec.Struct, frozen=True):
    """A client's request."""

    request: Generate
    patience: float | None = None
    """Seconds after which the client has gone."""


class Ended(msgspec.Struct, frozen=True):
    """What became of one."""

    id: str
    outcome: Literal["done", "cancelled", "failed"]
    tokens: tuple[int, ...]
    attempts: int = 0
    """Prefillers that were asked."""
    first: float | None = None
    """Seconds to the first token."""
    cause: str = ""


class _Node:
    """An instance, and an event loop on a thread of its own."""

    def __init__(self, args: ServeArgs, role: Role, name: str) -> None:
        self._instance = Instance(args, role, name=name)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class PrefillNode(_Node):
    """A prefiller's process; arguments are those of `ServeArgs`."""

    def __init__(self, args: dict[str, Any], name: str) -> None:
        asked = ServeArgs.model_validate(args)
        super().__init__(asked, "prefill", name)
        self._prefill = PrefillLoop(self._instance, asked.prefill)
        self._start(self._prefill.serve())

    def offer(self) -> bytes:
        return self._prefill.offer

    def held(self) -> str:
        """What is left of requests; empty if nothing is."""
        self._prefill.check()
        found = self._prefill.stats()
        free = found["idle"] and found["free_slots"] == found["slots"]
        return "" if free else str(found)


class DecodeNode(_Node):
    """A decoder's process, which finds the prefillers that it is told of."""

    def __init__(self, args: dict[str, Any], name: str) -> None:
        asked = ServeArgs.model_validate(args)
        super().__init__(asked, "decode", name)
        self._offers: dict[str, bytes] = {}
        self._ended: list[Ended] = []
        self._completions = self._start(self._made(asked)).result()

    async def _made(self, args: ServeArgs) -> Completions:
        words = tokenizer(args)
        return Completions(self._instance, args.decode, discovery=self, tokenizer=words)

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> PrefillerOffer:
        """See :class:`fabric_ray.serve.prefillers.Discovery`."""
        if not self._offers:
            raise NoPrefill("no prefiller is up")
        loads = {name: float(load.get(name, 0)) for name in self._offers}
        name = least_loaded(loads, avoid=avoid)[0]
        return PrefillerOffer(name, self._offers[name])

    def meet(self, offers: dict[str, bytes]) -> None:
        """The prefillers that there are from now on."""
        self._offers = offers

    def submit(self, orders: list[Order]) -> None:
        for order in orders:
            self._start(self._request(order))

    def take(self) -> list[Ended]:
        """What ended since the last call."""
        self._completions.check()
        ended, self._ended = self._ended, []
        return ended

    def held(self) -> str:
        """What is left of requests; empty if nothing is."""
        found = self._completions.stats()
        left = found["taken_slots"] or found["pulls"] or found["open"]
        return "" if found["idle"] and not left else str(found)

    async def _request(self, order: Order) -> None:
        tokens: list[int] = []
        try:
            ended = await asyncio.wait_for(self._complete(order.request, tokens), order.patience)
        except asyncio.TimeoutError:
            ended = Ended(order.request.id, "cancelled", tuple(tokens))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            ended = Ended(order.request.id, "failed", tuple(tokens), cause=cause)
        self._ended.append(ended)

    async def _complete(self, request: Generate, tokens: list[int]) -> Ended:
        async with contextlib.aclosing(self._completions.generate(request)) as events:
            async for event in events:
                if isinstance(event, Emitted):
                    tokens += event.tokens
                elif isinstance(event, Failed):
                    return Ended(request.id, "failed", tuple(tokens), cause=event.message)
                else:
                    took = event.timings
                    attempts, first = took.prefill_attempts, took.first_token
                    return Ended(request.id, "done", event.tokens, attempts, first)
        raise AssertionError(f"{request.id} ended without an event")
