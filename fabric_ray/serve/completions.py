"""A decoder's requests, from their arrival to their last token or the cause of their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from fabric_ray.inference.protocols import Tail
from fabric_ray.inference.sampling import Sampling
from fabric_ray.inference.tokenizer import Tokenizer
from fabric_ray.kvcache import Decoder
from fabric_ray.serve.asking import Asking
from fabric_ray.serve.clock import Clock
from fabric_ray.serve.config import DecodeArgs
from fabric_ray.serve.errors import BadRequest, Busy, ServeError
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.metrics import Metrics
from fabric_ray.serve.prefillers import Discovery, Prefillers
from fabric_ray.serve.seats import Seat, Seats
from fabric_ray.serve.steps import DecodeLoop, Row
from fabric_ray.serve.text import Text
from fabric_ray.serve.wire import Emitted, Event, Failed, Finished, Generate

logger = logging.getLogger(__name__)


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
        self._asking = Asking(instance, self._decoder, self._prefillers, args)
        self._seats = Seats(instance.pools, slots=instance.slots, max_queue=args.max_queue)
        self._loop = DecodeLoop(
            instance.engine, loop=asyncio.get_running_loop(), stuck_after=args.stuck_after
        )
        self._counts = {"finished": 0, "failed": 0, "busy": 0, "cancelled": 0}
        self._metrics = Metrics()
        self._open = 0

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """What comes of a request; the last event is :class:`Finished` or :class:`Failed`.

        Who stops reading cancels it: its pages come free as soon as no prefiller writes to them.
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
            # Whoever asked learns the cause, whatever it is.
            outcome = "failed"
            logger.exception("request %s failed", request.id)
            yield Failed.of(ServeError(f"{type(error).__name__}: {error}"))
        finally:
            self._open -= 1
            self._counts[outcome] += 1
            self._metrics.ended(outcome)

    async def _generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        vocab = self._instance.engine.model.config.vocab
        if not request.tokens or not all(0 <= token < vocab for token in request.tokens):
            raise BadRequest(
                f"the prompt must have at least one token, all of them below {vocab}; encode it "
                "with the model's tokenizer",
                param="prompt",
            )
        clock = Clock()
        seat = await self._seats.take(
            request.tokens,
            len(request.tokens) + request.max_tokens,
            timeout=self._args.queue_timeout,
        )
        clock.seated = time.monotonic()
        row: Row | None = None
        try:
            tail = await self._asking.tail(request, seat, clock)
            said: asyncio.Queue[tuple[int, str | None] | ServeError] = asyncio.Queue()
            row = self._row(request, seat, tail, said)
            self._loop.add(row)
            async with contextlib.aclosing(self._spoken(request, clock, row, said)) as events:
                async for event in events:
                    yield event
        finally:
            # A step may be writing to the row's pages: the batch says when it is out.
            if row is None:
                seat.leave()
            else:
                self._loop.remove(row)

    def _row(
        self,
        request: Generate,
        seat: Seat,
        tail: Tail,
        said: asyncio.Queue[tuple[int, str | None] | ServeError],
    ) -> Row:
        def on_token(token: int, finish: str | None) -> None:
            said.put_nowait((token, finish))

        def on_out(error: ServeError | None) -> None:
            # The last token was chosen and not computed with.
            seat.leave(known=[*request.tokens, *row.tokens[:-1]])
            if error is not None:
                said.put_nowait(error)

        row = Row(
            prompt_tokens=len(request.tokens),
            tables=seat.tables.tables,
            tail=tail,
            sampling=Sampling(request.temperature, request.top_p, request.seed),
            max_tokens=request.max_tokens,
            stop=self._tokenizer.stop,
            on_token=on_token,
            on_out=on_out,
        )
        return row

    async def _spoken(
        self,
        request: Generate,
        clock: Clock,
        row: Row,
        said: asyncio.Queue[tuple[int, str | None] | ServeError],
    ) -> AsyncGenerator[Event, None]:
        """Tokens of a row as text."""
        text = Text(self._tokenizer, request.stop)
        tokens: list[int] = []
        while True:
            came = await said.get()
            if isinstance(came, ServeError):
                raise came
            token, finish = came
            tokens.append(token)
            clock.last = time.monotonic()
            if len(tokens) == 1:
                clock.first = clock.last
            fresh = text.push(token)
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
        return {"open": float(self._open), "waiting": float(self._seats.waiting)}

    def stats(self) -> dict[str, Any]:
        return {
            **self._instance.stats(),
            **self._counts,
            "retries": self._asking.retries,
            "open": self._open,
            "waiting": self._seats.waiting,
            "running": self._loop.running,
            "steps": self._loop.steps,
            "tokens": self._loop.tokens,
            "taken_slots": self._seats.taken,
            "slots": self._seats.slots,
            "pulls": self._decoder.open,
            "prefillers": len(self._prefillers.met),
        }

    def close(self) -> None:
        self._decoder.close()
        self._loop.close()
