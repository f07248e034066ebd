"""The decoder's end: requests pages from prefillers, and reports when they are ready or free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context

from typing_extensions import Self

from fabric_ray import _native
from fabric_ray.errors import HandshakeError
from fabric_ray.kvcache.errors import KvCause, KvError, KvEvent, LayoutMismatch, error_for
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.kvcache.terms import RankCache, Terms, encoded, weakly


class Pull:
    """A request for pages.

    Don't read its pages before :meth:`ready` has returned. Don't give them to another request
    before :meth:`released` has returned (MR-1), even if the request failed.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._number = -1
        self._ready: Future[None] = Future()
        self._released: Future[None] = Future()

    @property
    def number(self) -> int:
        """Its number among the decoder's requests."""
        return self._number

    async def ready(self) -> None:
        """Returns when all pages and the tail have arrived (IC-2). Cancelling the wait doesn't
        cancel the request.

        Raises:
            KvError: the request failed; ``retryable`` says whether to ask another prefiller.
        """
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
        """Calls ``callback`` when the memory is free, at once if it is already. It runs on an
        engine's callback thread, in a copy of the caller's context."""
        context = copy_context()
        self._released.add_done_callback(lambda _: context.run(callback))

    @property
    def is_ready(self) -> bool:
        """Whether all pages have arrived."""
        return self._ready.done() and self._ready.exception() is None

    @property
    def error(self) -> KvError | None:
        """Why the request failed, if it did."""
        error = self._ready.exception() if self._ready.done() else None
        return error if isinstance(error, KvError) else None

    @property
    def is_released(self) -> bool:
        return self._released.done()

    def cancel(self) -> bool:
        """Cancels the request: :meth:`ready` raises :class:`PullCancelled` unless the request has
        ended, and :meth:`released` returns when the prefiller confirms that it writes no more.
        Returns whether the prefiller will never hear of the request, because its session was not
        open yet."""
        return self._decoder._native.cancel(self._number)

    def _on_event(self, event: KvEvent, cause: KvCause, text: str) -> None:
        if event == "ready":
            self._ready.set_result(None)
        elif event == "failed":
            self._ready.set_exception(error_for(cause, text))
        else:
            self._released.set_result(None)


class Decoder:
    """One process of a decoder instance (fabric-lib, section 4): requests pages and counts their
    arrival.

    Args:
        ranks: the ranks of this process; the engine of the first one receives messages.
        name: its name in the errors of prefillers.
        terms: heartbeats and limits.
        layouts: of all ranks of the instance; by default those of ``ranks``.
        first_rank: the number of the first rank of this process.

    Raises:
        InvalidArgument: layouts, ranks and regions don't match.
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
        # Events that came before request() returned the number.
        self._early: dict[int, list[tuple[KvEvent, KvCause, str]]] = {}
        every, local = encoded(ranks, layouts, first_rank)
        self._native = _native.KvDecoder(
            name=name,
            layouts=every,
            ranks=local,
            terms=(terms or Terms())._native(),
            on_event=weakly(self._on_event),
        )

    def connect(self, offer: bytes) -> int:
        """Opens a session with a prefiller; returns the prefiller's number. The memory gets a
        registration for this prefiller alone, which can be revoked separately.

        Raises:
            LayoutMismatch: the layouts of the two instances don't match.
            DecodeError: the offer is damaged, or of another version.
        """
        try:
            return self._native.connect(offer)
        except HandshakeError as error:
            raise LayoutMismatch(str(error)) from None

    def is_connected(self, prefiller: int) -> bool:
        """Whether the session with a prefiller is open."""
        return self._native.is_connected(prefiller)

    def renew(self, prefiller: int, leases: Sequence[int]) -> None:
        """Renews leases by the next heartbeat: of pages that weren't requested yet and will be.

        Does nothing once the session has ended. A call replaces what earlier ones gave since the
        last heartbeat.

        Args:
            prefiller: its number, from :meth:`connect`.
            leases: numbers, below 2**64, on which the engines at both ends agree.

        Raises:
            InvalidArgument: a number is out of this range.
        """
        self._native.renew(prefiller, leases)

    def disconnect(self, prefiller: int) -> None:
        """Ends the session with a prefiller: its requests fail."""
        self._native.disconnect(prefiller)

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
        """Requests the pages of a prompt from a prefiller.

        Args:
            prefiller: its number, from :meth:`connect`.
            tokens: length of the prompt.
            tables: for each group of the layout, the pages of all tokens in order.
            have: leading tokens that are in the pages already: whole pages, fewer than ``tokens``.
            tail_slot: the slot for logits and hidden states.
            payload: for the engine behind the prefiller, for example the prompt.
            timeout: seconds until the request fails with :class:`PullTimeout`.
            salt: chooses among replicas of prefill ranks.

        Raises:
            InvalidArgument: tables don't match ``tokens``, a page is out of range, or the payload
                is too long.
            Stale: the session has ended: :meth:`connect` again, or ask another prefiller.
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
        while True:
            with self._lock:
                early = self._early.pop(number, [])
                if not early:
                    # Only now: the callback thread would overtake an event that is reported here.
                    if not pull.is_released:
                        self._pulls[number] = pull
                    return pull
            for event in early:
                pull._on_event(*event)

    @property
    def open(self) -> int:
        """Requests whose pages aren't released."""
        return self._native.open

    def close(self) -> None:
        """Ends all sessions: requests fail, and are released when no peer can write any more."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_event(self, number: int, event: KvEvent, cause: KvCause, text: str) -> None:
        with self._lock:
            pull = self._pulls.get(number)
            if pull is None:
                self._early.setdefault(number, []).append((event, cause, text))
                return
            if event == "released":
                del self._pulls[number]
        pull._on_event(event, cause, text)
