"""Memory that the kernels of an exchange share with its host: a command FIFO, words, tables. The
other half is native/moe's ``device.rs``.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from fabric_ray._native import MoeExchange
from fabric_ray.kernels import Channel, Steps, Words
from fabric_ray.kernels.channel import add_command
from fabric_ray.kernels.launch import Launcher

_LINE = 128
#: Of a command: its value is twice the ticket, and one more.
MAX_TICKET = (1 << 31) - 1


class Word(enum.IntEnum):
    """The words that a device waits for, in their order in memory."""

    ABORT = 0
    OVER = 1
    ROUTES = 2
    ROWS = 3
    ROOM = 4
    ANSWERS = 5
    WAYS = 6


class DeviceEvent(enum.IntEnum):
    """A step that the device has finished; the slot of an atomic to its own rank."""

    BEGUN = 0
    PACKED = 1
    HANDED_OUT = 2
    ANSWERED = 3
    SUMMED = 4
    COMBINING = 5


class Mailbox:
    """One rank's words, tables and commands. A call launches everything it does, always in the same
    order.

    Args:
        native: the exchange.
        device: what its kernels run on.
        launcher: launches there.
        steps: collects what belongs to one launch.
    """

    def __init__(
        self,
        native: MoeExchange,
        rank: int,
        device: torch.device,
        launcher: Launcher,
        steps: Steps,
    ) -> None:
        self._launcher, self._steps = launcher, steps
        words, (row_turns, answer_turns) = native.device_words, native.device_turns
        commands = 2 * (4 + row_turns + answer_turns)
        capacity = max(32, 1 << (commands - 1).bit_length())
        # Completion words, FIFO slots and waited-for words, in host memory.
        self.host = _zeros(_LINE + 16 * capacity + 8 * words, device, on_host=True)
        completed, slots = self.host[:_LINE], self.host[_LINE : _LINE + 16 * capacity]
        self.words = self.host[_LINE + 16 * capacity :].view(torch.int64)
        self.completed = completed.view(torch.int64)
        self.pushers = _zeros(_LINE, device).view(torch.int64)
        self.fifo = Words(slots.data_ptr(), self.pushers.data_ptr(), completed.data_ptr(), capacity)
        self.tables = {
            name: self.words[first : first + n] for name, first, n in native.device_areas
        }
        self.mirror = {
            name: torch.zeros_like(of, device=device) for name, of in self.tables.items()
        }
        self._rank = rank
        # 1 until a wait fails, then 0 for good.
        self.gate = torch.ones(1, dtype=torch.int64, device=device)
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._waited = torch.zeros(1, dtype=torch.int32, device=device)
        # The value of each wait, and its growth with each exchange. An exchange whose answers are
        # summed counts one more.
        values = [-2, 0, 0, 0, *range(1, row_turns + 1), *range(1, answer_turns + 1)]
        grows = [2, 1, 1, 1, *[row_turns] * row_turns, *[answer_turns] * answer_turns]
        self._values = torch.tensor(values, dtype=torch.int64, device=device)
        self._grows = torch.tensor(grows, dtype=torch.int64, device=device)
        each = _each(self._values)
        self.over, self.routed, self.answered, self.ways = each[:4]
        self.lots, self.rooms = each[4 : 4 + row_turns], each[4 + row_turns :]

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of waits that are launched later."""
        abort = self._word(Word.ABORT)
        self._channel = Channel(
            self._launcher, self.fifo, abort=abort, timeout=seconds, steps=self._steps
        )

    @property
    def aborted(self) -> bool:
        """Whether the host has ended all waits."""
        return bool(self.words[Word.ABORT])

    def begin(self, tokens: int, given: Tensor, now: Tensor) -> None:
        """Begins the next exchange once the last one has ended. ``given`` receives its number of
        tokens. ``now`` receives the same, or 0 once a wait has failed, so that no token is packed
        over rows that may still be under way (MR-1)."""
        over, waits = self._word(Word.OVER), (self._values, self._grows)
        self._channel.begin_exchange(over, waits, tokens, (given, now), self._waited, self.gate)

    def tell(self, told: DeviceEvent, *, note: bool = False, ticket: int = 0) -> None:
        """Tells the host that all launched before has ended, with the device's note if there is
        one, and with the ticket that a caller waits for, up to ``MAX_TICKET``."""
        words = (self.mirror["note"], self.tables["note"]) if note else None
        # The next exchange waits until the answers of this one are summed.
        counter = self.over if told is DeviceEvent.SUMMED else None
        command = add_command(self._rank, told, 2 * ticket)
        self._channel.tell_host(
            command, self.gate, self._index, self._waited, note=words, counter=counter
        )

    def fetch(
        self, name: str, word: Word, value: Tensor, *, closed: int = 0, beside: bool = False
    ) -> Tensor:
        """A table of the host, copied to the device when the word has this value. It is ``closed``
        once a wait has failed, for the table may then be another exchange's (RS-1). ``beside``: the
        block that copies it doesn't wait for others first."""
        into = self.mirror[name]
        self._channel.fetch_words(
            self.tables[name], into, self._waited, self.gate,
            word=self._word(word), value=value, closed=closed, beside=beside,
        )  # fmt: skip
        return into

    def chunks(self, name: str, word: Word, value: Tensor) -> tuple[Tensor, Tensor]:
        """A table of chunks, and their number."""
        table = self.fetch(name, word, value)
        return table[1:].view(-1, 3), table[:1].view(torch.int32)[:1]

    def missing(self, ranks: int) -> Tensor:
        """Ranks whose answers are missing, once all others have arrived; all ranks once a wait has
        failed."""
        missing = self.fetch("missing", Word.ANSWERS, self.answered, closed=(1 << 64) - 1)
        return missing.view(torch.uint8)[:ranks]

    def _word(self, word: Word) -> int:
        return self.words.data_ptr() + 8 * word


def _zeros(nbytes: int, device: torch.device, *, on_host: bool = False) -> Tensor:
    """Zero bytes from the start of a cache line, on the device or in pinned host memory."""
    where = torch.device("cpu") if on_host else device
    pinned = on_host and device.type == "cuda"
    whole = torch.zeros(nbytes + _LINE, dtype=torch.uint8, device=where, pin_memory=pinned)
    begin = -whole.data_ptr() % _LINE
    found: Tensor = whole[begin : begin + nbytes]
    return found


def _each(tensor: Tensor) -> list[Tensor]:
    """Views of single elements."""
    return [tensor[i : i + 1] for i in range(len(tensor))]
