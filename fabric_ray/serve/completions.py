"""A decoder's requests, from arrival to the last token or the error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

from fabric_ray.inference.protocols import Tail
from fabric_ray.inference.sampling import Sampling
from fabric_ray.inference.tokenizer import Tokenizer
from fabric_ray.kvcache import Decoder
from fabric_ray.serve.config import DecodeArgs
from fabric_ray.serve.decode_loop import DecodeLoop, Row
from fabric_ray.serve.errors import BadRequest, Busy, ServeError
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.kv_allocator import KvAllocator, KvReservation
from fabric_ray.serve.messages import Emitted, Event, Failed, Finished, Generate
from fabric_ray.serve.metrics import Metrics
from fabric_ray.serve.prefill_client import PrefillClient
from fabric_ray.serve.prefillers import Discovery, Prefillers
from fabric_ray.serve.request_clock import RequestClock
from fabric_ray.serve.stop_text import StopTextFilter

logger = logging.getLogger(__name__)

_Step: TypeAlias = tuple[int, str | None] | ServeError
"""A token and why it was the last one, or the error that ended the row."""


class Completions:
    """Generates on pages that prefillers write. Lives on one event loop.

    Args:
        instance: engine, pages, tails.
        args: limits and deadlines.
        discovery: which prefillers there are.
        tokenizer: the model's.
    """

    def __init__(
        self, instance: Instance, args: DecodeArgs, *, discovery: Discovery, tokenizer: Tokenizer
    ) -> None:
        self._instance, self._args, self._tokenizer = instance, args, tokenizer
        self._decoder = Decoder(instance.ranks, name=instance.name, terms=instance.terms)
        self._prefillers = Prefillers(self._decoder, discovery, avoid_lost=args.avoid_lost)
        self._prefill_client = PrefillClient(instance, self._decoder, self._prefillers, args)
        self._allocator = KvAllocator(
            instance.pools, slots=instance.slots, max_queue=args.max_queue
        )
        self._loop = DecodeLoop(
            instance.engine, loop=asyncio.get_running_loop(), stuck_after=args.stuck_after
        )
        self._counts = {"finished": 0, "failed": 0, "busy": 0, "cancelled": 0}
        self._metrics = Metrics()
        self._open = 0

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The events of a request; the last one is :class:`Finished` or :class:`Failed`.

        Closing the generator cancels the request: its pages come free as soon as no prefiller can
        write to them.
        """
        self._open += 1
        outcome = "cancelled"
        try:
            async with contextlib.aclosing(self._generate(request)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        outcome = "finished"
                        self._metrics.record(event.timings)
                    yield event
        except ServeError as error:
            outcome = "busy" if isinstance(error, Busy) else "failed"
            yield Failed.of(error)
        except Exception as error:
            outcome = "failed"
            logger.exception("request %s failed", request.id)
            yield Failed.of(ServeError(f"{type(error).__name__}: {error}"))
        finally:
            self._open -= 1
            self._counts[outcome] += 1
            self._metrics.ended(outcome)

    async def _generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        vocab = self._instance.engine.tail.vocab
        if not request.tokens or not all(0 <= token < vocab for token in request.tokens):
            raise BadRequest(
                f"the prompt must have at least one token, all of them below {vocab}; encode it "
                "with the model's tokenizer",
                param="prompt",
            )
        clock = RequestClock()
        reservation = await self._allocator.reserve(
            request.tokens,
            len(request.tokens) + request.max_tokens,
            timeout=self._args.queue_timeout,
        )
        clock.reserved = time.monotonic()
        row: Row | None = None
        try:
            tail = await self._prefill_client.prefill(request, reservation, clock)
            steps: asyncio.Queue[_Step] = asyncio.Queue()
            row = self._row(request, reservation, tail, steps)
            self._loop.add(row)
            async with contextlib.aclosing(self._text_events(request, clock, steps)) as events:
                async for event in events:
                    yield event
        finally:
            # A step may be writing to the row's pages: on_out releases them.
            if row is None:
                reservation.release()
            else:
                self._loop.remove(row)

    def _row(
        self,
        request: Generate,
        reservation: KvReservation,
        tail: Tail,
        steps: asyncio.Queue[_Step],
    ) -> Row:
        def on_token(token: int, finish: str | None) -> None:
            steps.put_nowait((token, finish))

        def on_out(error: ServeError | None) -> None:
            # The last token has no keys and values yet.
            reservation.release(known=[*request.tokens, *row.tokens[:-1]])
            if error is not None:
                steps.put_nowait(error)

        row = Row(
            prompt_tokens=len(request.tokens),
            tables=reservation.tables.tables,
            tail=tail,
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                seed=request.seed,
            ),
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop=frozenset() if request.ignore_eos else self._tokenizer.stop,
            on_token=on_token,
            on_out=on_out,
        )
        return row

    async def _text_events(
        self, request: Generate, clock: RequestClock, steps: asyncio.Queue[_Step]
    ) -> AsyncGenerator[Event, None]:
        """The events of a row, with the text of its tokens."""
        text = StopTextFilter(self._tokenizer, request.stop)
        tokens: list[int] = []
        while True:
            step = await steps.get()
            if isinstance(step, ServeError):
                raise step
            token, finish = step
            tokens.append(token)
            clock.last = time.monotonic()
            if len(tokens) == 1:
                clock.first = clock.last
            # The stop token ends the text, also where its tokenizer gives it one.
            may_stop = len(tokens) > request.min_tokens
            fresh = "" if finish == "stop" else text.push(token, may_stop=may_stop)
            if text.stopped:
                finish = "stop"
            if finish is not None:
                rest = text.end() if request.stream else text.whole()
                fresh = fresh + rest if request.stream else rest
                timings = clock.timings(len(tokens))
                yield Finished(finish, tuple(tokens), fresh, timings)
                return
            if request.stream:
                yield Emitted((token,), fresh)

    def check(self) -> None:
        """Raises:
        Unavailable: the engine's thread has died, or hangs.
        """
        self._loop.check()

    @property
    def load(self) -> dict[str, float]:
        """For routing."""
        return {"open": float(self._open), "waiting": float(self._allocator.waiting)}

    def stats(self) -> dict[str, Any]:
        return {
            **self._instance.stats(),
            **self._counts,
            "retries": self._prefill_client.retries,
            "open": self._open,
            "waiting": self._allocator.waiting,
            "running": self._loop.running,
            "steps": self._loop.steps,
            "tokens": self._loop.tokens,
            "taken_slots": self._allocator.taken,
            "slots": self._allocator.slots,
            "pulls": self._decoder.open,
            "prefillers": len(self._prefillers.connected),
        }

    def close(self) -> None:
        self._decoder.close()
        self._loop.close()
