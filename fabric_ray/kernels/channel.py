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
from fabric_ray.kernels.steps import StepKind, Steps
from fabric_ray.kernels.structs import BeginExchange, FetchWords, Fifo, Patience, TellHost

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


class _PushCommands(ctypes.Structure):
    _fields_ = (
        ("fifo", Fifo),
        ("patience", Patience),
        ("commands", _pointer),
        ("n", _pointer),
        ("at_once", _u32),
        ("unused", _u32),
        ("indices", _pointer),
        ("waited", _pointer),
    )


class _AwaitCommand(ctypes.Structure):
    _fields_ = (
        ("fifo", Fifo),
        ("patience", Patience),
        ("index", _pointer),
        ("waited", _pointer),
    )


class _AwaitWord(ctypes.Structure):
    _fields_ = (
        ("word", _pointer),
        ("value", _pointer),
        ("patience", Patience),
        ("waited", _pointer),
        ("gate", _pointer),
    )


#: The struct that each kernel takes, by its file and name.
ARGUMENTS: dict[str, dict[str, type[ctypes.Structure]]] = {
    _FILE: {
        "push_commands": _PushCommands,
        "await_command": _AwaitCommand,
        "await_word": _AwaitWord,
    },
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
    """The device's end of a proxy's command FIFO (uccl-ep §3.1), and words that a device waits for.

    Args:
        launcher: :class:`~fabric_ray.kernels.Device`.
        fifo: ``None`` if it is only for words.
        abort: address of an 8-byte word that the host sets to non-zero when a rank that the device
            waits for is lost.
        timeout: seconds until a wait ends by itself.
        steps: runs :meth:`begin_exchange`, :meth:`fetch_words` and :meth:`tell_host`; each is a
            launch without.

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
        steps: Steps | None = None,
    ) -> None:
        if fifo is not None and (fifo.capacity < _WARP or fifo.capacity & (fifo.capacity - 1)):
            raise InvalidArgument(
                f"a FIFO of {fifo.capacity} commands: take a power of two, {_WARP} at least"
            )
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout is {timeout}; give seconds, more than 0")
        self._launcher = launcher
        self._steps = steps or Steps(launcher)
        self._fifo = fifo
        self._patience = Patience(abort, int(timeout * 1e9))

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
        self._launcher.launch(_FILE, "push_commands", blocks, _THREADS, arguments)

    def wait_command(self, index: Tensor, waited: Tensor) -> None:
        """Waits until the command with this index (int64 ``[1]``) is completed; ``waited`` (int32
        ``[1]``) takes how that ended."""
        arguments = _AwaitCommand(
            self._its_fifo(), self._patience, index.data_ptr(), waited.data_ptr()
        )
        self._launcher.launch(_FILE, "await_command", 1, _WARP, arguments)

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
        self._launcher.launch(_FILE, "await_word", 1, _WARP, arguments)

    def begin_exchange(
        self, over: int, waits: tuple[Tensor, Tensor], tokens: int, into: tuple[Tensor, Tensor],
        waited: Tensor, gate: Tensor,
    ) -> None:  # fmt: skip
        """What is waited for becomes that of the next exchange; then waits until the one before is
        over, and says how many tokens this one has.

        Args:
            over: the address of the word that is waited for.
            waits: int64 ``[waits]`` each: the value of each wait, and by how much it grows; the
                first is for ``over``, and is left even.
            into: int32 ``[1]`` each: takes the tokens, and those or none if a wait failed.
            waited: as for :meth:`wait_word`.
            gate: as for :meth:`wait_word`.
        """
        values, grows = waits
        given, now = into
        arguments = BeginExchange(
            self._patience,
            over,
            values.data_ptr(),
            grows.data_ptr(),
            len(values),
            tokens,
            given.data_ptr(),
            now.data_ptr(),
            waited.data_ptr(),
            gate.data_ptr(),
        )
        self._steps.run(StepKind.BEGIN_EXCHANGE, arguments)

    def fetch_words(
        self, table: Tensor, into: Tensor, waited: Tensor, gate: Tensor,
        *, word: int | None = None, value: Tensor | None = None, closed: int = 0,
        beside: bool = False,
    ) -> None:  # fmt: skip
        """What the host has written down, to the device, once a word has reached a value.

        Args:
            table: int64 ``[words]`` that the host writes, ``into`` the same on the device.
            waited: as for :meth:`wait_word`; nothing is waited for without.
            gate: as for :meth:`wait_word`.
            word: as for :meth:`wait_word`.
            value: as for :meth:`wait_word`.
            closed: what each of ``into`` becomes instead once a wait failed.
            beside: it needs nothing of what other blocks do before it.
        """
        if table.shape != into.shape or not (table.is_contiguous() and into.is_contiguous()):
            raise InvalidArgument("table and into [words], contiguous")
        arguments = FetchWords(
            self._patience,
            word,
            None if value is None else value.data_ptr(),
            waited.data_ptr(),
            gate.data_ptr(),
            table.data_ptr(),
            into.data_ptr(),
            table.numel(),
            closed,
        )
        self._steps.run(StepKind.FETCH_WORDS, arguments, beside=beside)

    def tell_host(
        self, command: tuple[int, int], gate: Tensor, index: Tensor, waited: Tensor,
        *, note: tuple[Tensor, Tensor] | None = None, counter: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Pushes one command, waiting for room; what was launched before is done then.

        Args:
            command: of :func:`add_command`, of an even value.
            gate: int64 ``[1]``, 0 or 1, is added to the value.
            index: as for :meth:`push`, of one command.
            waited: as for :meth:`push`.
            note: int64 ``[words]`` on the device, and where the host reads them when it hears this.
            counter: int64 ``[1]``, grows by one.
        """
        given, taken = (None, None) if note is None else note
        arguments = TellHost(
            self._its_fifo(),
            self._patience,
            (_u64 * 2)(*command),
            gate.data_ptr(),
            None if given is None else given.data_ptr(),
            None if taken is None else taken.data_ptr(),
            0 if given is None else given.numel(),
            None if counter is None else counter.data_ptr(),
            index.data_ptr(),
            waited.data_ptr(),
        )
        self._steps.run(StepKind.TELL_HOST, arguments)

    def _its_fifo(self) -> Fifo:
        if self._fifo is None:
            raise InvalidArgument("this channel has no FIFO; give it one")
        fifo = self._fifo
        return Fifo(fifo.slots, fifo.pushers, fifo.completed, fifo.capacity)
