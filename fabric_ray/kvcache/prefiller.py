"""The prefiller's end: takes requests, and has pages pushed while they are computed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType

from typing_extensions import Self

from fabric_ray import _native
from fabric_ray._native import KvTimeline, Watcher
from fabric_ray.kvcache.errors import KvError, of_cause
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.kvcache.terms import RankCache, Terms, encoded, weakly
from fabric_ray.kvcache.timeline import LayerTimes


class Job:
    """A request that has come, until its memory is free again."""

    def __init__(
        self,
        prefiller: Prefiller,
        number: int,
        asked: tuple[str, int, int, bytes],
        timeline: KvTimeline,
    ) -> None:
        self._prefiller, self._timeline = prefiller, timeline
        self.id = number
        self.decoder, self.tokens, self.have, self.payload = asked
        self._stopped: Future[KvError] = Future()
        self._released: Future[None] = Future()

    decoder: str
    """Who asks, by the name that it gave itself."""
    tokens: int
    """Of the prompt."""
    have: int
    """How many of the first ones needn't be sent."""
    payload: bytes
    """What the decoder wants the engine to know."""

    def accept(self, tables: Sequence[Sequence[int]], *, computed: int = 0) -> None:
        """Names our pages for all tokens, for each group. What is in them already, of the first
        ``computed`` tokens, is sent at once.

        Raises:
            InvalidArgument: the tables don't fit, or it was accepted before.
            Cancelled: the request is over.
        """
        tables = [list(table) for table in tables]
        self._prefiller._native.accept(self.id, tables, computed)

    def finish(self, tail_slot: int = 0) -> None:
        """Sends the tail from a slot of the first rank; the rest of the pages may still be leaving.

        Raises:
            InvalidArgument: there is no such slot, or it was called before.
            Cancelled: the request is over.
        """
        self._prefiller._native.finish(self.id, tail_slot)

    def fail(self, why: str) -> None:
        """Gives the request up; the decoder is told why."""
        self._prefiller._native.fail(self.id, why)

    def timeline(self) -> tuple[LayerTimes, ...]:
        """When its layers were computed, posted and delivered, in the order in which they are
        computed; also when it is over."""
        return tuple(LayerTimes(*times) for times in self._timeline.layers())

    @property
    def stopped(self) -> bool:
        """Whether what is computed is for nobody: it was cancelled, or its decoder is gone."""
        return self._stopped.done()

    @property
    def cause(self) -> KvError | None:
        """Why it was stopped."""
        return self._stopped.result() if self._stopped.done() else None

    def on_stop(self, callback: Callable[[KvError], object]) -> None:
        """Calls back when it is stopped, at once if it is; on an engine's callback thread, in a
        copy of the caller's context."""
        context = copy_context()
        self._stopped.add_done_callback(lambda future: context.run(callback, future.result()))

    async def released(self) -> None:
        """Returns when nothing reads its pages and its tail slot any more (MR-1)."""
        await asyncio.shield(asyncio.wrap_future(self._released))

    def wait_released(self, timeout: float | None = None) -> None:
        """As :meth:`released`, blocking; ``TimeoutError`` after so many seconds."""
        self._released.result(timeout)

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls back when its memory is free, at once if it is; on an engine's callback thread, in
        a copy of the caller's context."""
        context = copy_context()
        self._released.add_done_callback(lambda _: context.run(callback))

    @property
    def is_released(self) -> bool:
        return self._released.done()


class Prefiller:
    """A prefiller instance's process (fabric-lib, section 4 and appendix A).

    Args:
        ranks: those of this process; the first one's engine takes messages.
        name: what decoders call it in their errors.
        terms: what it holds decoders to.
        device: the GPU whose kernels count layers in :attr:`word`; ``None`` for the host.
        layouts: those of all ranks of the instance; by default this process has all.
        first_rank: the number of the first rank of this process. Rank 0 sends the tail.

    Raises:
        InvalidArgument: layouts, ranks and regions don't fit together.
    """

    def __init__(
        self,
        ranks: Sequence[RankCache],
        *,
        name: str = "prefiller",
        terms: Terms | None = None,
        device: int | None = None,
        layouts: Sequence[CacheLayout] | None = None,
        first_rank: int = 0,
    ) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closed = False
        every, local = encoded(ranks, layouts, first_rank)
        self._native = _native.KvPrefiller(
            name=name,
            layouts=every,
            ranks=local,
            terms=(terms or Terms())._native(),
            on_event=weakly(self._on_event),
            on_asked=weakly(self._on_asked),
            device=device,
        )
        self._word = self._native.word

    def offer(self) -> bytes:
        """What decoders need to know of it; to be published."""
        return self._native.offer()

    @property
    def word(self) -> Watcher:
        """The word that counts layers: one more for each, over all passes. A captured kernel may do
        it in place of :meth:`layer_done`."""
        return self._word

    @property
    def layers(self) -> int:
        """Layers of a pass."""
        return self._native.layers

    async def jobs(self) -> AsyncIterator[Job]:
        """Requests as they come; ends when the prefiller is closed. For one reader."""
        event = asyncio.Event()
        self._wake = mine = (asyncio.get_running_loop(), event)
        try:
            while True:
                for job in self.take():
                    yield job
                if self._closed:
                    return
                await event.wait()
                event.clear()
        finally:
            # A loop ends generators that were left when it likes: another may read by now.
            if self._wake is mine:
                self._wake = None

    def take(self) -> list[Job]:
        """The requests that have come since the last call; never waits."""
        with self._lock:
            jobs = list(self._waiting)
            self._waiting.clear()
        return jobs

    def begin(self, requests: Sequence[tuple[Job, int]], *, counted: int | None = None) -> None:
        """Says that a pass through all layers begins, which computes each of these requests up to
        so many of its tokens.

        It has the counts that follow, one for each layer. Passes follow one another: what of the
        last one isn't counted by now never will be, and its requests fail, for nobody knows what
        is in their pages.

        Args:
            requests: and their tokens that are computed after it.
            counted: what :attr:`word` will be when the pass begins, if a device still counts the
                one before; by default what it is.

        Raises:
            InvalidArgument: an earlier pass begins after more layers than this one.
        """
        self._native.begin([(job.id, done) for job, done in requests], counted)

    def layer_done(self, layer: int | None = None) -> None:
        """Says that one more layer of the pass is in the cache, of all ranks: its pages leave, on
        another thread. ``layer`` is for callers that number them; they come in order."""
        self._native.layer_done()

    @property
    def open(self) -> int:
        """Jobs that aren't released."""
        return self._native.jobs

    @property
    def decoders(self) -> int:
        """Decoders that it talks to."""
        return self._native.decoders

    def close(self) -> None:
        """Takes nothing new, stops all jobs and says so to the decoders."""
        self._closed = True
        self._native.close()
        self._poke()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _poke(self) -> None:
        wake = self._wake
        if wake is not None:
            with suppress(RuntimeError):  # the loop may be gone, and its reader
                wake[0].call_soon_threadsafe(wake[1].set)

    def _on_asked(
        self,
        number: int,
        decoder: str,
        tokens: int,
        have: int,
        payload: bytes,
        timeline: KvTimeline,
    ) -> None:
        job = Job(self, number, (decoder, tokens, have, payload), timeline)
        with self._lock:
            self._jobs[number] = job
            self._waiting.append(job)
        self._poke()

    def _on_event(self, number: int, what: str, cause: str, text: str) -> None:
        with self._lock:
            job = self._jobs.get(number)
            if job is not None and what == "released":
                del self._jobs[number]
        if job is None:
            return
        if what == "stopped":
            job._stopped.set_result(of_cause(cause, text))
        else:
            job._released.set_result(None)
