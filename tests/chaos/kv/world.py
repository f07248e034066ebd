"""A run over one transport: round after round of requests, and what was broken in each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.chaos.faults import Faults
from tests.chaos.kv.decode import HANG
from tests.chaos.kv.draw import (
    DECODERS,
    ELDERS,
    PREFILLERS,
    PROCESSES,
    SILENCE,
    KvRound,
    Side,
    draw,
    sides,
)
from tests.chaos.kv.judge import judge
from tests.chaos.kv.worker import KvWorker
from tests.chaos.process_group import Gone, ProcessGroup
from tests.chaos.world import Summary

# Rounds after which all engines are closed, and everything that they held must be gone.
LIFE = 10
PATIENCE = 30.0
# A prefiller whose decoder is gone knows it after a silence.
SETTLED = 4 * SILENCE + 4.0


class KvWorld:
    """Decoders and prefillers, and what is known of them between rounds."""

    def __init__(self, seed: int, transport: str) -> None:
        self._seed, self._transport = seed, transport
        self.summary = Summary(transport, seed)
        self._group = ProcessGroup(transport, make=KvWorker, ranks=PROCESSES)
        self._opened: set[int] = set()
        self._offers: dict[int, bytes] = {}
        self._sides: tuple[Side, Side] = sides(seed, transport, 0)
        self._disturbed = False

    def play(self, first: int, count: int, told: Callable[[], None] = lambda: None) -> Summary:
        """Rounds ``first`` to ``first + count - 1``."""
        began = time.monotonic()
        try:
            for number in range(first, first + count):
                self._round(number)
                if (number + 1) % LIFE == 0 or number == first + count - 1:
                    self._end_life(number)
                told()
        finally:
            self._group.close()
        self.summary.seconds = time.monotonic() - began
        if leak := self.summary.leak():
            self.summary.broken.append(leak)
        return self.summary

    def _round(self, number: int) -> None:
        self._open_all(number)
        stage = draw(self._seed, self._transport, number, self._sides[0].page_tokens)
        start = time.monotonic() + 0.01
        asks = {d: tuple(a for a in stage.asks if a.decoder == d) for d in DECODERS}
        with Faults(self._group, stage, start) as faults:
            args = {d: (asks[d], self._offers, start) for d in DECODERS}
            came = self._group.ask(KvWorker.ask, args, HANG + PATIENCE)
        broken = self._died(stage, came)
        disturbed = bool(stage.faults) or self._disturbed
        said = {d: each for d, each in came.items() if not isinstance(each, Exception)}
        wrong, results = judge(stage, said, disturbed=disturbed)
        broken += wrong
        for rank, settled in self._all(KvWorker.settle, SETTLED).items():
            what = [repr(settled)] if isinstance(settled, Exception) else settled
            broken += [f"w{rank}: {each}" for each in what]
        self._disturbed = bool(stage.faults)
        self._note(stage, faults, broken)
        self.summary.results += results

    def _died(self, stage: KvRound, came: dict[int, Any]) -> list[str]:
        killed = {f.victim for f in stage.faults if f.kind == "kill"}
        return [
            f"{'crash' if isinstance(each, Gone) else 'error'}: d{rank}: {each!r}"
            for rank, each in came.items()
            if isinstance(each, Exception) and not (isinstance(each, Gone) and rank in killed)
        ]

    def _note(self, stage: KvRound, faults: Faults, broken: list[str]) -> None:
        names = " and ".join(sorted(f.kind for f in stage.faults)) or "none"
        self.summary.rounds += 1
        self.summary.faults[names] += 1
        self.summary.results["sockets reset"] += faults.resets
        self.summary.notes.update(faults.notes)
        self.summary.broken += [
            f"{self._transport} seed {self._seed} round {stage.number} ({names}): {what}"
            for what in broken
        ]

    def _open_all(self, number: int) -> None:
        if not self._opened:
            self._sides = sides(self._seed, self._transport, number)
            self._disturbed = False
        for rank in self._group.renew():
            self._opened.discard(rank)
        closed = [rank for rank in PROCESSES if rank not in self._opened]
        args = {r: (self._sides[r in PREFILLERS], f"round{number}") for r in closed}
        for rank, offer in self._group.ask(KvWorker.open, args, PATIENCE).items():
            if isinstance(offer, Exception):
                raise RuntimeError(f"w{rank} opens no engine: {offer}")
            self._opened.add(rank)
            if offer is not None:
                self._offers[rank] = offer

    def _all(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """What each process says that lives."""
        ranks = [r for r, member in self._group.members.items() if member.killed_at is None]
        return self._group.ask(function, dict.fromkeys(ranks, args), PATIENCE)

    def _end_life(self, number: int) -> None:
        """Closes all engines; live workers must hold no more than before it opened its first."""
        held = 0
        for rank, said in self._all(KvWorker.close).items():
            if isinstance(said, Exception):
                self.summary.broken.append(f"{self._transport} round {number}: close: {said!r}")
                self._group.members[rank].kill()
                continue
            wrong, bytes_ = said
            self.summary.broken += [
                f"{self._transport} seed {self._seed} up to round {number}: w{rank}: {w}"
                for w in wrong
            ]
            held += bytes_ if rank in ELDERS else 0
        self.summary.in_use.append(held)
        self._opened.clear()
