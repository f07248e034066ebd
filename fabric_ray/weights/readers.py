"""Readers of a rollout's weights, and the gate at which a commit waits for them (RS-1)."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument, WeightSyncError

if TYPE_CHECKING:
    import torch

# A hook may wait for a reader, and the reader for the commit that runs the hook.
_ENTER_S = 60.0
_TOO_LONG = (
    f"a push has been changing the weights for {_ENTER_S:g} s; look for a hook that hangs or waits "
    "for a reader"
)
_ASYNC_POLL_S = 0.002

# The readings entered by the current thread or task, or by the one that started it.
_entered: ContextVar[tuple[Reading, ...]] = ContextVar("fabric_ray_readings", default=())


class ReaderGate:
    """Admits readers, except during a commit.

    Args:
        held: describes tensors of the version in use that are referred to outside a reading.
        holds: whether the calling thread or task took such tensors.
    """

    def __init__(self, held: Callable[[], tuple[str, ...]], holds: Callable[[], bool]) -> None:
        self._held = held
        self._holds = holds
        self._changed = threading.Condition(threading.RLock())
        self._readings: set[Reading] = set()
        self._calls: dict[FrameType, Reading] = {}
        self._closed_until = 0.0
        self._writer: int | None = None
        self._ended = False

    def close(self, seconds: float) -> tuple[str, ...]:
        """Admits no further reader for ``seconds``; returns the current readers.

        Raises:
            WeightSyncError: the caller itself is inside ``reading()``.
        """
        with self._changed:
            self._end_interrupted()
            self._refuse_readers()
            closed_before = self._is_closed
            self._closed_until = time.monotonic() + seconds
            if not self._readings and not closed_before and self._held():
                gc.collect()  # unreachable cycles may refer to tensors
            return self._inside()

    def open(self) -> None:
        with self._changed:
            self._closed_until = 0.0
            self._changed.notify_all()

    def end(self) -> None:
        """Refuses all further readers. Current readers keep their tensors."""
        with self._changed:
            self._ended = True
            # They refer to their target, and with it to the engine, in a cycle.
            self._held, self._holds = tuple, bool
            self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Blocks readers until the block ends; the calling thread may read.

        Raises:
            WeightSyncError: the version in use has a reader, or is being changed.
        """
        with self._changed:
            if self._writer is not None:
                raise WeightSyncError("another call is changing the weights; wait until it ends")
            self._end_interrupted()
            self._refuse_readers()
            self.check_unread()
            self._writer = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
            self.open()

    def check_unread(self) -> None:
        """Raises WeightSyncError if the version in use is read or its tensors are held."""
        with self._changed:
            if inside := self._inside():
                raise WeightSyncError(f"the version in use is still read: {'; '.join(inside)}")

    @contextmanager
    def access(self, reading: Reading | None) -> Iterator[None]:
        """Waits until the weights may be read, and keeps them unchanged for the block."""
        with self._changed:
            if reading is None or not reading.depth:
                self._wait("read the weights inside `async with target.reading()`")
            yield

    def enter(self, reading: Reading, *, block: bool = True) -> bool:
        """Admits a reader; returns ``False`` if that would block and ``block`` is false."""
        with self._changed:
            self._end_interrupted()
            outer = self._outer()
            if outer is None:
                if not block and not self._ended and self._must_wait:
                    return False
                self._wait("use `async with target.reading()`")
                # Before it counts as a reader: one that is refused keeps no commit waiting.
                reading.check()
                self._readings.add(reading)
                outer = reading
                outer.since = time.monotonic()
            outer.depth += 1
            reading.stack.append(outer)
            if reading.call is not None:
                self._calls[reading.call] = reading
            _entered.set((*(r for r in _entered.get() if r.depth), outer))
            return True

    def leave(self, reading: Reading) -> None:
        with self._changed:
            outer = reading.stack.pop()
            if reading.call is not None:
                del self._calls[reading.call]
            outer.depth -= 1
            if not outer.depth:
                self._readings.discard(outer)
            _entered.set(tuple(r for r in _entered.get() if r.depth))

    def leave_call(self, call: FrameType) -> None:
        """Ends the reader of a call, if there is one."""
        with self._changed:
            if reading := self._calls.get(call):
                self.leave(reading)
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Ends readers whose call was interrupted. ``KeyboardInterrupt``, by which Ray cancels too,
        runs no hook of a module."""
        for call, reading in list(self._calls.items()):
            try:
                call.clear()
            except RuntimeError:  # the call is running
                continue
            self.leave(reading)

    @property
    def _is_closed(self) -> bool:
        return self._writer is not None or time.monotonic() < self._closed_until

    @property
    def _must_wait(self) -> bool:
        """Whether the caller has to wait before it reads. A commit waits for the tensors that a
        caller holds, so that caller doesn't wait for the commit."""
        if self._writer is not None:
            return self._writer != threading.get_ident()
        return self._is_closed and not self._holds()

    def _outer(self) -> Reading | None:
        """The reading that encloses the caller."""
        return next((r for r in _entered.get() if r.depth and r in self._readings), None)

    def _refuse_readers(self) -> None:
        if outer := self._outer():
            what = "a forward pass" if outer.is_forward else "reading()"
            raise WeightSyncError(
                f"a push was called inside {what}, by {outer}, and would wait for it; push after "
                f"{what} has ended"
            )

    def _inside(self) -> tuple[str, ...]:
        """Describes the current readers, then says what their holders can do."""
        readers = (*map(str, self._readings), *self._held())
        return (*readers, self._advice()) if readers else ()

    def _advice(self) -> str:
        if not self._readings:
            return (
                "read them inside `with target.reading()` and drop them there, or bind the module "
                "by WeightTarget(into=module)"
            )
        ends = []
        if any(not reading.is_forward for reading in self._readings):
            ends.append("end the reading() block sooner")
        if any(reading.is_forward for reading in self._readings):
            ends.append("push between forward passes")
        held = ", drop its tensors before it ends" if self._held() else ""
        return f"{' and '.join(ends)}{held}, or raise WeightSync(timeout=)"

    def _wait(self, instead: str) -> None:
        """Returns when the caller may read. The caller holds the condition's lock."""
        give_up = time.monotonic() + _ENTER_S
        while not self._ended and self._must_wait and self._outer() is None:
            if _in_event_loop():
                raise WeightSyncError(
                    f"a push is changing the weights, and an event loop can't wait here; {instead}"
                )
            now = time.monotonic()
            if now > give_up:
                raise WeightSyncError(_TOO_LONG)
            until = give_up if self._writer is not None else min(give_up, self._closed_until)
            self._changed.wait(max(0.0, until - now) + 1e-3)
        if self._ended:
            raise WeightSyncError("this weight target is closed; make another one")


class Reading:
    """A block in which the weights don't change: ``with``, or ``async with`` in event loops.

    Args:
        gate: makes commits wait for the block.
        weights: returns the weights that the block reads.
        check: raises if the weights can't be read.
        where: the caller, for errors.
        call: a frame whose end also ends the reading.
    """

    def __init__(
        self,
        gate: ReaderGate,
        weights: Callable[[Reading], Mapping[str, torch.Tensor]],
        check: Callable[[], None],
        where: str,
        call: FrameType | None = None,
    ) -> None:
        self._gate = gate
        self.call = call
        self._weights = weights
        self.check = check
        self._where = where
        self._thread = ""
        self.depth = 0
        """Number of nested blocks of the same thread or task."""
        self.stack: list[Reading] = []
        self.since = 0.0

    @property
    def is_forward(self) -> bool:
        """Whether a module's forward pass reads, not a block of the user."""
        return self.call is not None

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        lasts = "has run" if self.is_forward else "has been inside reading()"
        return f"{self._where} in {self._thread} {lasts} for {seconds:.1f} s"

    def __enter__(self) -> Mapping[str, torch.Tensor]:
        if _in_event_loop() and not any(r.depth for r in _entered.get()):
            raise InvalidArgument(
                "`with target.reading()` runs in an event loop, which it would block; use "
                "`async with target.reading()`"
            )
        self.name_thread()
        self._gate.enter(self)
        return self._weights(self.stack[-1])

    def __exit__(self, *_: object) -> None:
        self._gate.leave(self)

    async def __aenter__(self) -> Mapping[str, torch.Tensor]:
        self.name_thread()
        give_up = time.monotonic() + _ENTER_S
        while not self._gate.enter(self, block=False):
            if time.monotonic() > give_up:
                raise WeightSyncError(_TOO_LONG)
            await asyncio.sleep(_ASYNC_POLL_S)
        return self._weights(self.stack[-1])

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self)

    def name_thread(self) -> None:
        self._thread = f"thread {threading.current_thread().name}"
        if _in_event_loop() and (task := asyncio.current_task()):
            self._thread = f"task {task.get_name()}"


class LiveWeights(Mapping[str, "torch.Tensor"]):
    """The containers of the version in use, looked up at each access.

    Args:
        names: returns the containers' names.
        look_up: returns a container, inside or outside a reading.
        reading: the block after which lookups raise; ``None`` outside a reading.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[str, Any]],
        look_up: Callable[[str, Reading | None], torch.Tensor],
        reading: Reading | None,
    ) -> None:
        self._names, self._look_up, self._reading = names, look_up, reading

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._reading is not None and not self._reading.depth:
            raise WeightSyncError(
                f"`{name}` was read after its `reading()` had ended; read it inside"
            )
        return self._look_up(name, self._reading)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


def caller(depth: int) -> str:
    """The calling function and its line."""
    frame = sys._getframe(depth + 1)
    code = frame.f_code
    return f"`{code.co_name}` ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None
