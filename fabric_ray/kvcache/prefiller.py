"""The prefiller's end: receives requests, and pushes pages while they are computed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context

from typing_extensions import Self

from fabric_ray import _native
from fabric_ray._native import KvTimeline, Watcher
from fabric_ray.kvcache.errors import KvCause, KvError, KvEvent, RefusalReason, error_for
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.kvcache.terms import RankCache, Terms, encoded, weakly
from fabric_ray.kvcache.timeline import LayerTimes


class Job:
    """A request of a decoder, until its memory is free again."""

    def __init__(
        self,
        prefiller: Prefiller,
        number: int,
        request: tuple[str, int, int, bytes],
        timeline: KvTimeline,
    ) -> None:
        self._prefiller, self._timeline = prefiller, timeline
        self.id = number
        self.decoder, self.tokens, self.have, self.payload = request
        self._stopped: Future[KvError] = Future()
        self._released: Future[None] = Future()

    decoder: str
    """The name of the decoder."""
    tokens: int
    """Length of the prompt."""
    have: int
    """Leading tokens that needn't be sent."""
    payload: bytes
    """The decoder's data for the engine."""

    def accept(self, tables: Sequence[Sequence[int]], *, computed: int = 0) -> None:
        """Names the pages that hold all tokens, for each group. The first ``computed`` tokens are
        in them already and are sent at once.

        Raises:
            InvalidArgument: the tables don't match, or the request was accepted before.
            Cancelled: the request has ended.
        """
        tables = [list(table) for table in tables]
        self._prefiller._native.accept(self.id, tables, computed)

    def finish(self, tail_slot: int = 0) -> None:
        """Sends the tail from a slot of the first rank, while pages may still be under way.

        Raises:
            InvalidArgument: the slot is out of range, or it was called before.
            Cancelled: the request has ended.
        """
        self._prefiller._native.finish(self.id, tail_slot)

    def fail(self, why: str) -> None:
        """Fails the request: the decoder's pull raises :class:`PrefillFailed` with this text."""
        self._prefiller._native.fail(self.id, why)

    def refuse(self, reason: RefusalReason, why: str) -> None:
        """Refuses the request: the decoder's pull raises :class:`PullRefused` with this reason."""
        self._prefiller._native.refuse(self.id, reason.value, why)

    def timeline(self) -> tuple[LayerTimes, ...]:
        """When each layer was computed, posted and delivered, in the order of computation; also
        after the request has ended."""
        return tuple(LayerTimes(*times) for times in self._timeline.layers())

    @property
    def stopped(self) -> bool:
        """Whether the request was cancelled or its decoder is gone: computing it is useless."""
        return self._stopped.done()

    @property
    def cause(self) -> KvError | None:
        """Why it was stopped."""
        return self._stopped.result() if self._stopped.done() else None

    def on_stop(self, callback: Callable[[KvError], object]) -> None:
        """Calls ``callback`` when the request is stopped, at once if it is already. It runs on an
        engine's callback thread, in a copy of the caller's context."""
        context = copy_context()
        self._stopped.add_done_callback(lambda future: context.run(callback, future.result()))

    async def released(self) -> None:
        """Returns when nothing reads its pages and its tail slot any more (MR-1)."""
        await asyncio.shield(asyncio.wrap_future(self._released))

    def wait_released(self, timeout: float | None = None) -> None:
        """As :meth:`released`, blocking; ``TimeoutError`` after so many seconds."""
        self._released.result(timeout)

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` when the memory is free, at once if it is already. It runs on an
        engine's callback thread, in a copy of the caller's context."""
        context = copy_context()
        self._released.add_done_callback(lambda _: context.run(callback))

    @property
    def is_released(self) -> bool:
        return self._released.done()


class Prefiller:
    """One process of a prefiller instance (fabric-lib, section 4 and appendix A).

    Args:
        ranks: the ranks of this process; the engine of the first one receives messages.
        name: its name in the errors of decoders.
        terms: heartbeats and limits.
        device: the GPU whose kernels count layers in :attr:`word`; ``None`` for the host.
        layouts: of all ranks of the instance; by default those of ``ranks``.
        first_rank: the number of the first rank of this process. Rank 0 sends the tail.

    Raises:
        InvalidArgument: layouts, ranks and regions don't match.
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
        self._renewed: Callable[[list[int]], object] | None = None
        every, local = encoded(ranks, layouts, first_rank)
        self._native = _native.KvPrefiller(
            name=name,
            layouts=every,
            ranks=local,
            terms=(terms or Terms())._native(),
            on_event=weakly(self._on_event),
            on_request=weakly(self._on_request),
            on_renewal=weakly(self._on_renewal),
            device=device,
        )
        self._word = self._native.word

    def offer(self) -> bytes:
        """What :meth:`Decoder.connect` takes; publish it to decoders."""
        return self._native.offer()

    @property
    def word(self) -> Watcher:
        """The word that counts computed layers over all passes. A captured kernel may increment it
        instead of :meth:`layer_done`."""
        return self._word

    @property
    def layers(self) -> int:
        """Layers of a pass."""
        return self._native.layers

    async def jobs(self) -> AsyncIterator[Job]:
        """Yields requests until the prefiller is closed. Only one reader at a time."""
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
            # An event loop may finalise an abandoned generator after another reader has begun.
            if self._wake is mine:
                self._wake = None

    def take(self) -> list[Job]:
        """The requests since the last call; never waits."""
        with self._lock:
            jobs = list(self._waiting)
            self._waiting.clear()
        return jobs

    def on_renewal(self, callback: Callable[[list[int]], object]) -> None:
        """Calls ``callback`` with the leases that a decoder renews (:meth:`Decoder.renew`), at most
        128 at a time. Numbers may be of no lease here. It runs on an engine's callback thread; a
        second callback takes the place of the first."""
        self._renewed = callback

    def begin(self, requests: Sequence[tuple[Job, int]], *, counted: int | None = None) -> None:
        """Begins a pass through all layers that computes each request up to a number of tokens.

        The next counts of :attr:`word` belong to this pass, one for each layer. If layers of the
        last pass are still uncounted, its requests fail: the content of their pages is unknown.

        Args:
            requests: pairs of a request and its number of computed tokens after the pass.
            counted: the value of :attr:`word` when the pass begins, where a device still counts
                the last pass; by default its present value.

        Raises:
            InvalidArgument: ``counted`` is lower than that of an earlier pass.
        """
        self._native.begin([(job.id, done) for job, done in requests], counted)

    def layer_done(self, layer: int | None = None) -> None:
        """One more layer of the pass is in the cache of all ranks: another thread sends its pages.
        ``layer`` is ignored, for callers that pass the number; layers come in order."""
        self._native.layer_done()

    @property
    def open(self) -> int:
        """Number of jobs that aren't released."""
        return self._native.jobs

    @property
    def decoders(self) -> int:
        """Number of decoders with an open session."""
        return self._native.decoders

    def close(self) -> None:
        """Stops all jobs, tells their decoders, and accepts no more requests."""
        self._closed = True
        self._native.close()
        self._wake_reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake_reader(self) -> None:
        wake = self._wake
        if wake is not None:
            with suppress(RuntimeError):  # The loop may be closed.
                wake[0].call_soon_threadsafe(wake[1].set)

    def _on_request(
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
        self._wake_reader()

    def _on_renewal(self, leases: list[int]) -> None:
        if self._renewed is not None:
            self._renewed(leases)

    def _on_event(self, number: int, event: KvEvent, cause: KvCause, text: str) -> None:
        with self._lock:
            job = self._jobs.get(number)
            if job is not None and event == "released":
                del self._jobs[number]
        if job is None:
            return
        if event == "stopped":
            job._stopped.set_result(error_for(cause, text))
        else:
            job._released.set_result(None)
