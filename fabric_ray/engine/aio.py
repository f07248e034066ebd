"""How transfers are awaited: a short spin while traffic flows, then the loop's own descriptor.

No engine thread ever takes the GIL to wake a loop: completions go into a queue whose descriptor the
loop watches, many to one wake-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary

from fabric_ray._native import CompletionQueue, Transfer

# While completions keep coming this quickly, an await spins a little before it leaves the loop to
# others, and comes back a few times before it sleeps: a sleeping core takes some 40 us to wake.
_SPIN_US = 10
_RETURNS = 8
_LIVELY_S = 200e-6


class _Notifier:
    """One loop's completions."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next = 0
        self.last = 0.0
        loop.add_reader(self._queue.fileno(), self._wake)

    def future(self, loop: asyncio.AbstractEventLoop, transfer: Transfer) -> asyncio.Future[None]:
        self._next += 1
        key = self._next
        future = loop.create_future()
        self._waiting[key] = future
        transfer._notify(self._queue, key)
        return future

    def _wake(self) -> None:
        for key in self._queue.drain():
            future = self._waiting.pop(key, None)
            if future is not None and not future.done():
                future.set_result(None)


_notifiers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Notifier] = WeakKeyDictionary()


def awaiting(transfer: Transfer) -> Generator[Any, None, None]:
    """The body of ``await transfer``."""
    loop = asyncio.get_running_loop()
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = _Notifier(loop)
    lively = time.monotonic() - notifier.last < _LIVELY_S
    done = transfer._spin(_SPIN_US if lively else 1)
    if not done and lively:
        for _ in range(_RETURNS):
            yield  # other tasks run
            done = transfer._spin(_SPIN_US)
            if done:
                break
    if not done:
        yield from notifier.future(loop, transfer)
    notifier.last = time.monotonic()
    transfer.result()
