"""Steps of an exchange: each by itself, or several in one launch (``moe/steps.cu``)."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fabric_ray.kernels import structs
from fabric_ray.kernels.launch import Launcher

if TYPE_CHECKING:
    from torch import Tensor

FILE = "moe/steps.cu"
_MOVES = "run_steps"
_THREADS = 256
_LINE = 128
_KERNELS = tuple(structs.ARGUMENTS[FILE])
#: 8-byte words that blocks meet by: a cache line for each kernel.
MEETING_WORDS = _LINE // 8 * len(_KERNELS)


class StepKind(enum.IntEnum):
    """What a step does; the order is that of ``moe/steps.cu``."""

    BEGIN_EXCHANGE = 0
    FETCH_WORDS = 1
    TELL_HOST = 2
    COUNT_ROUTES = 3
    SUM_ROUTES = 4
    PLACE_ROUTES = 5
    PACK_ROWS = 6
    PLACE_ROWS = 7
    HAND_OUT = 8
    PACK_ANSWERS = 9
    SUM_ANSWERS = 10
    CAST_ROWS = 11


#: Steps that kernels which sum can do, too.
_OF_SUMS = {StepKind.FETCH_WORDS, StepKind.TELL_HOST, StepKind.SUM_ANSWERS}


class _Flag(enum.IntFlag):
    ALONE = 1
    BESIDE = 2


class Steps:
    """Launches steps, in their order.

    Args:
        launcher: launches on a device.
        meeting: int64 ``[MEETING_WORDS]`` there, all zero: by these the blocks of a launch wait for
            one another. Needed for :meth:`together`; launches with it come one after another.
        most: blocks of such a launch, at most.
    """

    def __init__(
        self, launcher: Launcher, meeting: Tensor | None = None, *, most: int = 1 << 16
    ) -> None:
        self._launcher, self._meeting, self._most = launcher, meeting, most
        self._blocks = 0
        self._collects = self.launched = False
        self._collected: list[structs.Step] = []
        self._kernel = _MOVES

    def run(
        self,
        kind: StepKind,
        arguments: ctypes.Structure,
        blocks: int = 1,
        *,
        kernel: str = _MOVES,
        beside: bool = False,
    ) -> None:
        """Launches a step, or adds it to what is collected.

        Args:
            blocks: that have something to do.
            kernel: that does it.
            beside: it needs nothing of the steps that are collected before it.
        """
        step = structs.Step(kind)
        step.arguments.set(arguments)
        if not self._collects:
            self._launch(kernel, [step], max(1, blocks), together=False)
            return
        if blocks <= 1:
            step.flags |= _Flag.ALONE
        if beside:
            step.flags |= _Flag.BESIDE
        if len(self._collected) == structs.MAX_STEPS or not self._joins(kind, kernel):
            self._flush()
        if kernel != _MOVES:
            self._kernel = kernel
        self._collected.append(step)

    def _joins(self, kind: StepKind, kernel: str) -> bool:
        """Whether one kernel does this step and those that are collected."""
        if self._kernel != _MOVES:
            return kernel in (_MOVES, self._kernel) and kind in _OF_SUMS
        return kernel == _MOVES or all(step.kind in _OF_SUMS for step in self._collected)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launches what is run in it at its end, and as one. Nothing of it if there is an error;
        or a part, then :attr:`launched` is true."""
        self._collects, self.launched = True, False
        try:
            yield
            self._flush()
        finally:
            self._collects, self._kernel = False, _MOVES
            self._collected.clear()

    def _flush(self) -> None:
        steps, kernel = [*self._collected], self._kernel
        self._collected.clear()
        self._kernel = _MOVES
        if steps:
            self.launched = True
            self._launch(kernel, steps, self._at_a_time(), together=True)

    def _at_a_time(self) -> int:
        """Blocks of a launch: always as many, for the word that they meet by; half of those that
        fit of the largest kernel, so that a launch of any other fits beside one that waits."""
        if not self._blocks:
            resident = min(self._launcher.resident(FILE, name, _THREADS) for name in _KERNELS)
            self._blocks = max(1, min(resident // 2, self._most))
        return self._blocks

    def _launch(
        self, kernel: str, steps: list[structs.Step], blocks: int, *, together: bool
    ) -> None:
        meeting = None
        if self._meeting is not None:
            meeting = self._meeting.data_ptr() + _LINE * _KERNELS.index(kernel)
        elif together:
            raise AssertionError("launches of several steps need words to meet by")
        arguments = structs.Steps(meeting, len(steps))
        arguments.step[: len(steps)] = steps
        self._launcher.launch(FILE, kernel, blocks, _THREADS, arguments, together=together)
