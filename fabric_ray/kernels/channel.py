"""Kernels between kernels: commands to a proxy, and waits for words that the host writes.

No wait is for ever: each ends with its word, with the abort word, or after ``timeout``.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels.launch import Launcher

if TYPE_CHECKING:
    from torch import Tensor

_FILE = "common/channel.cu"
_WARP = 32
_THREADS = 128
_BLOCKS = 64

_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Waited(enum.IntEnum):
    """How a wait ended."""

    READY = 0
    TIMED_OUT = 1
    ABORTED = 2


class _Patience(ctypes.Structure):
    _fields_ = (("abort", _pointer), ("timeout_ns", _u64))


class _Fifo(ctypes.Structure):
    _fields_ = (
        ("slots", _pointer),
        ("pushers", _pointer),
        ("completed", _pointer),
        ("capacity", _u64),
    )


class _PushCommands(ctypes.Structure):
    _fields_ = (
        ("fifo", _Fifo),
        ("patience", _Patience),
        ("commands", _pointer),
        ("n", _pointer),
        ("at_once", _u32),
        ("unused", _u32),
        ("indices", _pointer),
        ("waited", _pointer),
    )


class _AwaitCommand(ctypes.Structure):
    _fields_ = (
        ("fifo", _Fifo),
        ("patience", _Patience),
        ("index", _pointer),
        ("waited", _pointer),
    )


class _AwaitWord(ctypes.Structure):
    _fields_ = (
        ("word", _pointer),
        ("value", _pointer),
        ("patience", _Patience),
        ("waited", _pointer),
        ("gate", _pointer),
    )


#: The struct that each kernel takes, by its file and name.
ARGUMENTS: dict[str, dict[str, type[ctypes.Structure]]] = {
    _FILE: {
        "push_commands": _PushCommands,
        "await_command": _AwaitCommand,
        "await_word": _AwaitWord,
    }
}


def add_command(rank: int, slot: int, value: int) -> tuple[int, int]:
    """The words of a command that adds to one of a rank's atomic words, in order, by channel 0
    (``add_command`` of ``common/command.cuh``).

    Args:
        rank: below 1024.
        slot: below 4096.
        value: from 0, below 2 to the 32nd.

    Raises:
        InvalidArgument: what doesn't fit.
    """
    for name, given, most in (
        ("rank", rank, 1024),
        ("slot", slot, 4096),
        ("value", value, 1 << 32),
    ):
        if not 0 <= given < most:
            raise InvalidArgument(f"a command's {name} is {given}; give 0 to {most - 1}")
    return (3 << 60 | 1 << 59 | rank << 44 | slot << 32 | value, 0)


@dataclass(frozen=True)
class Words:
    """Where a FIFO lies, as addresses that the device reaches; all zero to begin with."""

    slots: int
    """In host memory: 16 bytes for each command."""
    pushers: int
    """Two words of 8 bytes, in the device's memory."""
    completed: int
    """One word of 8 bytes, which the host writes."""
    capacity: int
    """A power of two, 32 at least: a warp pushes at once."""


class Channel:
    """The device's end of a proxy's FIFO (uccl-ep §3.1), and words that a device waits for.

    Args:
        launcher: :class:`~fabric_ray.kernels.Device`.
        fifo: ``None`` if it is only for words.
        abort: the address of a word of 8 bytes that the host makes anything but 0 when somebody
            who is waited for is lost.
        timeout: seconds until a wait ends by itself.

    Raises:
        InvalidArgument: a capacity that a FIFO can't have, or no time to wait.
    """

    def __init__(
        self,
        launcher: Launcher,
        fifo: Words | None = None,
        *,
        abort: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        if fifo is not None and (fifo.capacity < _WARP or fifo.capacity & (fifo.capacity - 1)):
            raise InvalidArgument(
                f"a FIFO of {fifo.capacity} commands: take a power of two, {_WARP} at least"
            )
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout is {timeout}; give seconds, more than 0")
        self._launcher = launcher
        self._fifo = fifo
        self._patience = _Patience(abort, int(timeout * 1e9))

    def push(
        self, commands: Tensor, n: Tensor, indices: Tensor, waited: Tensor, *, at_once: bool = True
    ) -> None:
        """Pushes commands, waiting for room.

        Args:
            commands: int64 ``[most, 2]``, as the proxy decodes them.
            n: int32 ``[1]``, how many of them there are now.
            indices: int64 ``[most]``, takes the index of each in the FIFO; -1 if it wasn't pushed.
            waited: int32 ``[most]``, takes how each push ended, a :class:`Waited`.
            at_once: a warp's commands in their order, with one claim; else each by itself.
        """
        most = commands.shape[0]
        shapes = ((commands, (most, 2)), (n, (1,)), (indices, (most,)), (waited, (most,)))
        if any(tuple(t.shape) != shape or not t.is_contiguous() for t, shape in shapes):
            raise InvalidArgument(
                "commands [most, 2], n [1], indices and waited [most], contiguous"
            )
        arguments = _PushCommands(
            self._its_fifo(),
            self._patience,
            commands.data_ptr(),
            n.data_ptr(),
            at_once,
            0,
            indices.data_ptr(),
            waited.data_ptr(),
        )
        blocks = max(1, min(-(-most // _THREADS), _BLOCKS))
        self._launcher.launch(_FILE, "push_commands", (blocks, 1), _THREADS, arguments)

    def wait_command(self, index: Tensor, waited: Tensor) -> None:
        """Waits until the command with this index (int64 ``[1]``) is completed; ``waited`` (int32
        ``[1]``) takes how that ended."""
        arguments = _AwaitCommand(
            self._its_fifo(), self._patience, index.data_ptr(), waited.data_ptr()
        )
        self._launcher.launch(_FILE, "await_command", (1, 1), _WARP, arguments)

    def wait_word(
        self, word: int, value: Tensor, waited: Tensor, *, gate: Tensor | None = None
    ) -> None:
        """Waits until a word of 8 bytes at this address, which only grows, has reached a value
        (int64 ``[1]``); what follows on the stream sees what was written before. ``waited`` (int32
        ``[1]``) takes how that ended; ``gate`` (int64 ``[1]``) becomes 0 if the word did not come,
        and is left alone if it did."""
        arguments = _AwaitWord(
            word,
            value.data_ptr(),
            self._patience,
            waited.data_ptr(),
            None if gate is None else gate.data_ptr(),
        )
        self._launcher.launch(_FILE, "await_word", (1, 1), _WARP, arguments)

    def _its_fifo(self) -> _Fifo:
        if self._fifo is None:
            raise InvalidArgument("this channel has no FIFO; give it one")
        fifo = self._fifo
        return _Fifo(fifo.slots, fifo.pushers, fifo.completed, fifo.capacity)
