"""Allocates a decoder's pages and tail slots to requests: all or nothing, in order of arrival.
Memory is free again when no peer can write to it (MR-1)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from fabric_ray.inference.errors import OutOfPages, PageMisuse
from fabric_ray.inference.tables import CachePools, Tables, first_seen
from fabric_ray.kvcache import Pull
from fabric_ray.serve.errors import BadRequest, Busy


class KvReservation:
    """The pages and the tail slot of one request, until :meth:`release`."""

    def __init__(
        self, allocator: KvAllocator, prompt: Sequence[int], tokens: int, tables: Tables, slot: int
    ) -> None:
        self._allocator = allocator
        self.prompt, self.tokens, self.tables, self.slot = prompt, tokens, tables, slot
        self.prefix = tables.prefix
        """Tokens that are in its pages already."""
        self._pull: Pull | None = None
        self._ready = False
        self._is_released = False

    def attach(self, pull: Pull) -> None:
        """Peers may write to the new pages and the slot until the pull is released.

        Raises:
            PageMisuse: an earlier pull may still write to them.
        """
        if self._pull is not None:
            raise PageMisuse("an earlier pull may still write to these pages; await quiesced()")
        self._pull = pull
        loop = asyncio.get_running_loop()

        def released(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(self._on_pull_released, pull)

        pull.on_release(released)

    @property
    def is_quiesced(self) -> bool:
        """Whether no peer can write to the memory."""
        return self._pull is None

    async def quiesced(self) -> None:
        """Returns when no peer can write to the memory."""
        if self._pull is not None:
            await self._pull.released()
            self._pull = None

    async def replace(self, *, timeout: float) -> None:
        """Gives up pages and slot to the peer that may still write to them, and reserves others.

        Raises:
            Busy: none came free in time; the reservation is released then.
        """
        if self._pull is not None:
            old = KvReservation(self._allocator, self.prompt, self.tokens, self.tables, self.slot)
            old.attach(self._pull)
            self._pull, self._is_released = None, True
            old.release()
            fresh = await self._allocator.reserve(self.prompt, self.tokens, timeout=timeout)
            self.tables, self.slot, self.prefix = fresh.tables, fresh.slot, fresh.prefix
            self._is_released = False

    def on_pages_ready(self) -> None:
        """All pages of the prompt have arrived."""
        self._ready = True
        self._share(self.prompt)

    def release(self, *, known: Sequence[int] = ()) -> None:
        """Frees the memory, at once or when no peer can write to it. A second call does nothing.

        Args:
            known: tokens whose keys and values are in the pages, for requests with the same prefix.
        """
        if self._is_released:
            return
        self._is_released = True
        if self._pull is None:
            if self._ready:
                self._share(known)
            self.tables.close()
            self._allocator.free(self)
            return
        self._pull.cancel()
        self.tables.hold()

    def _on_pull_released(self, pull: Pull) -> None:
        if self._pull is not pull:
            return
        self._pull = None
        if self._is_released:
            self.tables.release()
            self._allocator.free(self)
        elif self._ready:
            self._share(self.prompt)

    def _share(self, tokens: Sequence[int]) -> None:
        # Shared pages can't be held: no page is shared while a peer may write.
        if self._pull is None and tokens:
            self.tables.insert(tokens, windowed_from=self._windowed_from())

    def _windowed_from(self) -> int:
        """Peers send only the tokens that the token after the prompt attends to."""
        groups = self._allocator.pools.groups
        return max(first_seen(len(self.prompt), group.window) for group in groups)


class _QueuedRequest:
    def __init__(self, prompt: Sequence[int], tokens: int) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.reservation: asyncio.Future[KvReservation]
        self.reservation = asyncio.get_running_loop().create_future()


class KvAllocator:
    """Reserves pages and slots of a decoder for requests.

    Args:
        pools: the pages.
        slots: most requests that have pages at the same time.
        max_queue: most requests that wait for pages.
    """

    def __init__(self, pools: CachePools, *, slots: int, max_queue: int) -> None:
        self.pools, self.slots, self._max_queue = pools, slots, max_queue
        self._free = list(range(slots))
        self._queue: deque[_QueuedRequest] = deque()

    async def reserve(self, prompt: Sequence[int], tokens: int, *, timeout: float) -> KvReservation:
        """Waits for the pages of a request.

        Args:
            prompt: token ids.
            tokens: most tokens of the request, prompt included.
            timeout: seconds.

        Raises:
            BadRequest: the cache is too small for the request.
            Busy: the queue is full, or no pages came free in time.
        """
        if not self.pools.fits(tokens):
            room = min(pool.total * pool.page_tokens for pool in self.pools.pools)
            raise BadRequest(
                f"prompt and max_tokens need {tokens} tokens, the cache has {room}; shorten the "
                "prompt or lower max_tokens",
                param="max_tokens",
            )
        waiting = _QueuedRequest(prompt, tokens)
        self._queue.append(waiting)
        self._assign_next()
        if not waiting.reservation.done() and len(self._queue) > self._max_queue:
            self._queue.remove(waiting)
            raise Busy(f"{len(self._queue)} requests wait for pages here; try again later")
        expiry = asyncio.get_running_loop().call_later(timeout, self._expire, waiting, timeout)
        try:
            return await waiting.reservation
        except asyncio.CancelledError:
            # A reservation that was made in the same moment is released.
            made = waiting.reservation.done() and not waiting.reservation.cancelled()
            if made and waiting.reservation.exception() is None:
                waiting.reservation.result().release()
            raise
        finally:
            expiry.cancel()
            with contextlib.suppress(ValueError):
                self._queue.remove(waiting)
            self._assign_next()

    def free(self, reservation: KvReservation) -> None:
        """The pages of a reservation have been freed."""
        self._free.append(reservation.slot)
        self._assign_next()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def taken(self) -> int:
        """Reservations whose memory isn't free, including those to which peers may still write."""
        return self.slots - len(self._free)

    def _assign_next(self) -> None:
        while self._queue and self._free:
            waiting = self._queue[0]
            if not waiting.reservation.done():
                try:
                    tables = self.pools.open(waiting.prompt, waiting.tokens)
                except OutOfPages:
                    return  # The oldest request goes first: none overtakes it.
                slot = self._free.pop()
                waiting.reservation.set_result(
                    KvReservation(self, waiting.prompt, waiting.tokens, tables, slot)
                )
            self._queue.popleft()

    def _expire(self, waiting: _QueuedRequest, timeout: float) -> None:
        if not waiting.reservation.done():
            waiting.reservation.set_exception(
                Busy(f"no pages came free within {timeout:g} s; try again later")
            )
