"""The decoder's end: asks prefillers for pages, and knows when they are there or free again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from types import TracebackType

from typing_extensions import Self

from fabric_ray import _native
from fabric_ray.errors import HandshakeError
from fabric_ray.kvcache.errors import KvError, LayoutMismatch, of_cause
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.kvcache.terms import RankCache, Terms, encoded, weakly


class Pull:
    """A request for pages, from the call that makes it until its memory is free again.

    Its pages must not be read before :meth:`ready` has returned, and not be given to another
    request before :meth:`released` has (MR-1), whatever became of it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._number = -1
        self._ready: Future[None] = Future()
        self._released: Future[None] = Future()

    @property
    def number(self) -> int:
        """As the decoder counts its requests."""
        return self._number

    async def ready(self) -> None:
        """Returns when every page and the tail are there (IC-2).

        Raises:
            KvError: they will not be; its class says why, ``retryable`` whether to ask another.
        """
        # Who waits may be cancelled; the request isn't, by that.
        await asyncio.shield(asyncio.wrap_future(self._ready))

    def wait_ready(self, timeout: float | None = None) -> None:
        """As :meth:`ready`, blocking; ``TimeoutError`` after so many seconds."""
        self._ready.result(timeout)

    async def released(self) -> None:
        """Returns when nothing that the prefiller wrote can land any more (MR-1)."""
        await asyncio.shield(asyncio.wrap_future(self._released))

    def wait_released(self, timeout: float | None = None) -> None:
        """As :meth:`released`, blocking; ``TimeoutError`` after so many seconds."""
        self._released.result(timeout)

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls back when the memory is free, at once if it is; on an engine's callback thread, in
        a copy of the caller's context."""
        context = copy_context()
        self._released.add_done_callback(lambda _: context.run(callback))

    @property
    def is_ready(self) -> bool:
        """Whether the pages are there."""
        return self._ready.done() and self._ready.exception() is None

    @property
    def error(self) -> KvError | None:
        """Why they will not be."""
        error = self._ready.exception() if self._ready.done() else None
        return error if isinstance(error, KvError) else None

    @property
    def is_released(self) -> bool:
        return self._released.done()

    def cancel(self) -> None:
        """Gives it up: :meth:`ready` raises :class:`PullCancelled` unless it was over, and
        :meth:`released` returns when the prefiller has confirmed that it writes no more."""
        self._decoder._native.cancel(self._number)

    def _tell(self, what: str, cause: str, text: str) -> None:
        if what == "ready":
            self._ready.set_result(None)
        elif what == "failed":
            self._ready.set_exception(of_cause(cause, text))
        else:
            self._released.set_result(None)


class Decoder:
    """A decoder instance's process (fabric-lib, section 4): asks, and counts what arrives.

    Args:
        ranks: those of this process; the first one's engine takes messages.
        name: what prefillers call it in their errors.
        terms: what it holds prefillers to.
        layouts: those of all ranks of the instance; by default this process has all.
        first_rank: the number of the first rank of this process.

    Raises:
        InvalidArgument: layouts, ranks and regions don't fit together.
    """

    def __init__(
        self,
        ranks: Sequence[RankCache],
        *,
        name: str = "decoder",
        terms: Terms | None = None,
        layouts: Sequence[CacheLayout] | None = None,
        first_rank: int = 0,
    ) -> None:
        self._lock = threading.Lock()
        self._pulls: dict[int, Pull] = {}
        # What became of requests whose number isn't known here yet.
        self._early: dict[int, list[tuple[str, str, str]]] = {}
        every, local = encoded(ranks, layouts, first_rank)
        self._native = _native.KvDecoder(
            name=name,
            layouts=every,
            ranks=local,
            terms=(terms or Terms())._native(),
            on_event=weakly(self._on_event),
        )

    def meet(self, offer: bytes) -> int:
        """Makes a prefiller known; returns its number. The memory is registered once more for it,
        so that it can be taken back from it alone.

        Raises:
            LayoutMismatch: its pages and ours don't fit together.
            DecodeError: the offer is damaged, or of another version.
        """
        try:
            return self._native.meet(offer)
        except HandshakeError as error:
            raise LayoutMismatch(str(error)) from None

    def knows(self, prefiller: int) -> bool:
        """Whether it can be asked: it hasn't been given up."""
        return self._native.knows(prefiller)

    def leave(self, prefiller: int) -> None:
        """Parts with a prefiller: what was asked of it fails."""
        self._native.leave(prefiller)

    def pull(
        self,
        prefiller: int,
        *,
        tokens: int,
        tables: Sequence[Sequence[int]],
        have: int = 0,
        tail_slot: int = 0,
        payload: bytes = b"",
        timeout: float = 60.0,
        salt: int = 0,
    ) -> Pull:
        """Asks a prefiller for the pages of a prompt.

        Args:
            prefiller: its number, from :meth:`meet`.
            tokens: of the prompt.
            tables: the pages of all tokens, in their order, for each group of the layout.
            have: how many of the first tokens are in them already: whole pages, not all tokens.
            tail_slot: where logits and hidden states are to go.
            payload: for the engine behind the prefiller: the prompt.
            timeout: seconds until it fails with :class:`PullTimeout`.
            salt: chooses among replicas of what prefill ranks hold.

        Raises:
            InvalidArgument: tables that don't fit the tokens, pages that there aren't, a payload
                that is too long.
            Stale: the prefiller has been given up: :meth:`meet` it again, or ask another.
        """
        pull = Pull(self)
        number = self._native.request(
            prefiller,
            tokens=tokens,
            have=have,
            salt=salt,
            tables=[list(table) for table in tables],
            tail_slot=tail_slot,
            payload=payload,
            timeout=timeout,
        )
        pull._number = number
        with self._lock:
            early = self._early.pop(number, [])
            if not any(what == "released" for what, _, _ in early):
                self._pulls[number] = pull
        for event in early:
            pull._tell(*event)
        return pull

    @property
    def open(self) -> int:
        """Requests whose pages aren't released."""
        return self._native.open

    def close(self) -> None:
        """Parts with all prefillers; what was asked fails, and is released when it is safe."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _on_event(self, number: int, what: str, cause: str, text: str) -> None:
        with self._lock:
            pull = self._pulls.get(number)
            if pull is None:
                self._early.setdefault(number, []).append((what, cause, text))
                return
            if what == "released":
                del self._pulls[number]
        pull._tell(what, cause, text)
