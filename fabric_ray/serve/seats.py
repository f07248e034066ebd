"""Pages and a tail slot for each request of a decoder, handed out all or nothing, first come first
served, and taken back only when no peer can write to them (MR-1)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from fabric_ray.inference.errors import OutOfPages, PageMisuse
from fabric_ray.inference.tables import CachePools, Tables, first_seen
from fabric_ray.kvcache import Pull
from fabric_ray.serve.errors import BadRequest, Busy


class Seat:
    """What one request has of a decoder's memory, until :meth:`leave`."""

    def __init__(
        self, seats: Seats, prompt: Sequence[int], tokens: int, tables: Tables, slot: int
    ) -> None:
        self._seats = seats
        self.prompt, self.tokens, self.tables, self.slot = prompt, tokens, tables, slot
        self.prefix = tables.prefix
        """Tokens that are in its pages already."""
        self._pull: Pull | None = None
        self._ready = False
        self._left = False

    def expect(self, pull: Pull) -> None:
        """Peers write to the seat's fresh pages and its slot from here on, until the pull is
        released.

        Raises:
            PageMisuse: what was asked before may still write to them.
        """
        if self._pull is not None:
            raise PageMisuse("a peer may still write to the seat; wait until it is quiet")
        self._pull = pull
        loop = asyncio.get_running_loop()

        def released(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(self._released, pull)

        pull.on_release(released)

    @property
    def is_quiet(self) -> bool:
        """Whether no peer can write to it."""
        return self._pull is None

    async def quiet(self) -> None:
        """Returns when no peer can write to it."""
        if self._pull is not None:
            await self._pull.released()
            self._pull = None

    async def renew(self, *, timeout: float) -> None:
        """Leaves its pages and slot to the peer that may still write to them, and takes others.

        Raises:
            Busy: there are none in time; the seat is left then.
        """
        if self._pull is not None:
            old = Seat(self._seats, self.prompt, self.tokens, self.tables, self.slot)
            old.expect(self._pull)
            self._pull, self._left = None, True
            old.leave()
            fresh = await self._seats.take(self.prompt, self.tokens, timeout=timeout)
            self.tables, self.slot, self.prefix = fresh.tables, fresh.slot, fresh.prefix
            self._left = False

    def arrived(self) -> None:
        """All pages of the prompt are there."""
        self._ready = True
        self._remember(self.prompt)

    def leave(self, *, known: Sequence[int] = ()) -> None:
        """Gives everything back, now or when no peer writes any more. Doing so again does nothing.

        Args:
            known: the tokens whose keys and values are in the pages, for requests that begin alike.
        """
        if self._left:
            return
        self._left = True
        if self._pull is None:
            if self._ready:
                self._remember(known)
            self.tables.close()
            self._seats.give_back(self)
            return
        self._pull.cancel()
        self.tables.hold()

    def _released(self, pull: Pull) -> None:
        if self._pull is not pull:
            return
        self._pull = None
        if self._left:
            self.tables.release()
            self._seats.give_back(self)
        elif self._ready:
            self._remember(self.prompt)

    def _remember(self, tokens: Sequence[int]) -> None:
        # Pages that others share can't be held: none is shared while a peer may write.
        if self._pull is None and tokens:
            self.tables.insert(tokens, windowed_from=self._windowed_from())

    def _windowed_from(self) -> int:
        """Peers send what the token after the prompt looks back on, and no more."""
        groups = self._seats.pools.groups
        return max(first_seen(len(self.prompt), group.window) for group in groups)


class _Waiting:
    def __init__(self, prompt: Sequence[int], tokens: int) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()


class Seats:
    """All of a decoder's pages and slots.

    Args:
        pools: the pages.
        slots: requests that may have pages at the same time.
        max_queue: requests that may wait for them.
    """

    def __init__(self, pools: CachePools, *, slots: int, max_queue: int) -> None:
        self.pools, self.slots, self._max_queue = pools, slots, max_queue
        self._free = list(range(slots))
        self._queue: deque[_Waiting] = deque()

    async def take(self, prompt: Sequence[int], tokens: int, *, timeout: float) -> Seat:
        """Waits for pages for a request.

        Args:
            prompt: ids.
            tokens: positions that it may come to have, prompt included.
            timeout: seconds.

        Raises:
            BadRequest: the cache is too small for it.
            Busy: too many wait already, or pages didn't come in time.
        """
        if not self.pools.fits(tokens):
            room = min(pool.total * pool.page_tokens for pool in self.pools.pools)
            raise BadRequest(
                f"the prompt and max_tokens make {tokens} tokens and the cache has room for "
                f"{room}; shorten the prompt, or lower max_tokens",
                param="max_tokens",
            )
        waiting = _Waiting(prompt, tokens)
        self._queue.append(waiting)
        self._seat_next()
        if not waiting.seat.done() and len(self._queue) > self._max_queue:
            self._queue.remove(waiting)
            raise Busy(f"{len(self._queue)} requests wait for pages here; try again later")
        expiry = asyncio.get_running_loop().call_later(timeout, self._expire, waiting, timeout)
        try:
            return await waiting.seat
        except asyncio.CancelledError:
            # What came in the same moment: a seat goes back, and being too late changes nothing.
            came = waiting.seat.done() and not waiting.seat.cancelled()
            if came and waiting.seat.exception() is None:
                waiting.seat.result().leave()
            raise
        finally:
            expiry.cancel()
            with contextlib.suppress(ValueError):
                self._queue.remove(waiting)
            self._seat_next()

    def give_back(self, seat: Seat) -> None:
        """A seat's pages are free."""
        self._free.append(seat.slot)
        self._seat_next()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def taken(self) -> int:
        """Seats that aren't given back, those included that peers may still write to."""
        return self.slots - len(self._free)

    def _seat_next(self) -> None:
        while self._queue and self._free:
            waiting = self._queue[0]
            if not waiting.seat.done():
                try:
                    tables = self.pools.open(waiting.prompt, waiting.tokens)
                except OutOfPages:
                    return  # until pages come back: the oldest goes first
                slot = self._free.pop()
                seat = Seat(self, waiting.prompt, waiting.tokens, tables, slot)
                waiting.seat.set_result(seat)
            self._queue.popleft()

    def _expire(self, waiting: _Waiting, timeout: float) -> None:
        if not waiting.seat.done():
            waiting.seat.set_exception(
                Busy(f"no pages came free within {timeout:g} s; try again later")
            )
