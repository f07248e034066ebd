"""A process of a run: a decoder or a prefiller, for one set of engines after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tests.chaos.belongings import Belongings, in_use
from tests.chaos.kv.decode import Came, DecoderProcess
from tests.chaos.kv.draw import DECODERS, Ask, Side
from tests.chaos.kv.prefill import PrefillerProcess


class KvWorker:
    """Which of the two follows from its rank."""

    def __init__(self, rank: int, transport: str) -> None:
        self._rank, self._transport = rank, transport
        self._made: DecoderProcess | PrefillerProcess | None = None
        self._before: Belongings | None = None
        # What a process loads and starts once.
        self.open(Side(1, 16, False), "warm")
        self.close()
        self._before = Belongings()

    def open(self, side: Side, life: str) -> bytes | None:
        """Opens engines; a prefiller's offer."""
        if self._rank in DECODERS:
            self._made = DecoderProcess(f"d{self._rank}-{life}", self._transport, side)
            return None
        self._made = made = PrefillerProcess(f"p{self._rank}-{life}", self._transport, side)
        return made.prefiller.offer()

    def ask(self, asks: Sequence[Ask], offers: Mapping[int, bytes], start: float) -> list[Came]:
        """A decoder's part of a round."""
        assert isinstance(self._made, DecoderProcess)
        return self._made.run(asks, offers, start)

    def settle(self, limit: float) -> list[str]:
        """After a round: all requests are over, all pages are free; what is wrong."""
        assert self._made is not None
        deadline = time.monotonic() + limit
        while not self._made.idle and time.monotonic() < deadline:
            time.sleep(0.002)
        late = [] if self._made.idle else [f"leak: pages are taken {limit} s after the round"]
        return self._made.wrong() + late

    def close(self) -> tuple[list[str], int]:
        """Closes the engines; what they left behind, and how much memory the process has."""
        assert self._made is not None
        wrong = self._made.close()
        self._made = None
        if self._before is not None and (left := self._before.left(8.0)):
            wrong = [*wrong, f"leak: after its engines were closed, {left}"]
        return wrong, in_use()
