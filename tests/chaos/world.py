"""A run over one transport: round after round, and what was broken in each."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fabric_ray.weights import WeightSync
from tests.chaos import judge, weights
from tests.chaos.draw import ELDER, ROLLOUTS, TRAINERS, WORKERS, Round, draw
from tests.chaos.faults import Faults
from tests.chaos.process_group import Gone, ProcessGroup
from tests.chaos.reports import GRACE, Opened
from tests.chaos.worker import Worker

# Rounds after which all engines are closed, and everything that they held must be gone.
LIFE = 10
# Beyond all timeouts of what a process may be asked.
PATIENCE = 15.0
MIB = 1 << 20


@dataclass
class Summary:
    """What a run over one transport came to."""

    transport: str
    seed: int
    rounds: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    results: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)
    in_use: list[int] = field(default_factory=list)
    """Bytes of what lives longest, each time its engines were closed."""

    def leak(self) -> str | None:
        """Whether memory grows: the last third beside the one before. The first warms up."""
        third = len(self.in_use) // 3
        if third < 3:
            return None
        middle = sorted(self.in_use[-2 * third : -third])[third // 2]
        last = sorted(self.in_use[-third:])[third // 2]
        if last - middle > max(MIB, middle // 100):
            return f"leak: the eldest grew from {middle // MIB} to {last // MIB} MiB"
        return None


class World:
    """Processes, their engines, and what is known of them between rounds."""

    def __init__(self, seed: int, transport: str) -> None:
        self._seed, self._transport = seed, transport
        self.summary = Summary(transport, seed)
        self._group = ProcessGroup(transport)
        self._opened: dict[int, Opened] = {}
        self._sync: WeightSync | None = None
        self._reached = 0
        self._in_place = self._replicas = False
        self._broken: list[str] = []

    def play(self, first: int, count: int, told: Callable[[], None] = lambda: None) -> Summary:
        """Rounds ``first`` to ``first + count - 1``."""
        began = time.monotonic()
        try:
            for number in range(first, first + count):
                self._round(draw(self._seed, self._transport, number))
                if (number + 1) % LIFE == 0 or number == first + count - 1:
                    self._end_life(number)
                told()
        finally:
            self._group.close()
        self.summary.seconds = time.monotonic() - began
        if leak := self.summary.leak():
            self.summary.broken.append(leak)
        return self.summary

    def _round(self, stage: Round) -> None:
        self._open_all(stage.number)
        self._broken = []
        (self._transfers if stage.kind == "transfers" else self._weights)(stage)
        faults = " and ".join(sorted(f.kind for f in stage.faults)) or "none"
        self.summary.rounds += 1
        self.summary.faults[f"{stage.kind}: {faults}"] += 1
        for what in self._broken:
            self.summary.broken.append(
                f"{self._transport} seed {self._seed} round {stage.number} "
                f"({stage.kind}, {faults}): {what}"
            )

    def _open_all(self, number: int) -> None:
        if not self._opened:
            dice = random.Random(f"{self._seed}/{number}")
            self._in_place, self._replicas = dice.random() < 0.3, dice.random() < 0.5
        for rank in self._group.renew():
            self._opened.pop(rank, None)
            self._sync = None
        closed = {rank: () for rank in range(WORKERS) if rank not in self._opened}
        for rank, opened in self._group.ask(Worker.open, closed, PATIENCE).items():
            if isinstance(opened, Exception):
                raise RuntimeError(f"w{rank} opens no engine: {opened}")
            self._opened[rank] = opened
            if opened.no_full_disk:
                self.summary.notes.add(f"no disk was full: mount: {opened.no_full_disk}")

    def _all(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """What each process says that lives."""
        ranks = [r for r, member in self._group.members.items() if member.killed_at is None]
        return self._group.ask(function, dict.fromkeys(ranks, args), PATIENCE)

    def _transfers(self, stage: Round) -> None:
        prepared = self._all(Worker.prepare, stage)
        failed = {r: e for r, e in prepared.items() if isinstance(e, Exception)}
        if failed:
            self._broken += [f"error: w{r} made no room: {e!r}" for r, e in failed.items()]
            return
        offers = {id_: o for each, _ in prepared.values() for id_, o in each.items()}
        refs = {(r, k): ref for r, (_, each) in prepared.items() for k, ref in each.items()}
        addresses = {rank: opened.address for rank, opened in self._opened.items()}
        start = time.monotonic() + 0.01
        with Faults(self._group, stage, start) as faults:
            longest = max(p.timeout for p in stage.pieces) + GRACE + PATIENCE
            args = (stage, offers, refs, addresses, start)
            ran = self._group.ask(Worker.run, dict.fromkeys(range(WORKERS), args), longest)
        said = judge.Said(ran, killed=self._killed())
        said.full = {r for r, o in self._opened.items() if o.full}
        outcomes = {e.id: e for _, e in said.sent() if e.id >= 0}
        said.settled = self._all(Worker.settle, stage, outcomes)
        wrong, results = judge.judge(stage, said)
        self._broken += wrong
        self._note(faults, results)

    def _weights(self, stage: Round) -> None:
        version = stage.number + 1
        members = (*TRAINERS, *ROLLOUTS)
        joined = self._all(weights.join, self._seed, self._in_place, self._replicas)
        joined |= self._all(weights.train, self._seed, version)
        failed = [f"error: {e!r}" for e in joined.values() if isinstance(e, Exception)]
        if failed:
            self._broken += failed
            return
        if self._sync is None:
            self._sync = weights.controller(
                self._group, digest=bool(stage.number % 2), replicas=self._replicas
            )
            self._sync.connect()
        if stage.reconnect:
            self._sync = weights.controller(self._group, digest=True, replicas=self._replicas)
        start = time.monotonic() + 0.005
        with Faults(self._group, stage, start) as faults:
            time.sleep(0.005)
            pushed = weights.push(self._sync, version, self._reached, self._in_place)
        killed = self._killed()
        found = self._all(weights.held, self._seed)
        for rank, each in found.items():
            if isinstance(each, Gone) and rank not in killed:
                self._broken.append(f"crash: w{rank} died without being killed")
            elif isinstance(each, Exception) and rank in ROLLOUTS:
                self._broken.append(f"error: w{rank}: {each!r}")
        self._broken += weights.judge(stage, pushed, found, killed)
        self._reached = pushed.reached
        assert len(members) == WORKERS
        error = type(pushed.error).__name__ if pushed.error else "ok"
        self._note(faults, Counter({f"push: {error}": 1}))

    def _killed(self) -> dict[int, float]:
        return {r: m.killed_at for r, m in self._group.members.items() if m.killed_at is not None}

    def _note(self, faults: Faults, results: Counter[str]) -> None:
        self.summary.results += results
        self.summary.results["sockets reset"] += faults.resets
        self.summary.notes.update(faults.notes)

    def _end_life(self, number: int) -> None:
        """Closes all engines; live workers must hold no more than before it opened its first."""
        self._sync = None
        for rank, said in self._all(Worker.close).items():
            if isinstance(said, Exception):
                self.summary.broken.append(f"{self._transport} round {number}: close: {said!r}")
                self._group.members[rank].kill()
                continue
            wrong, held = said
            self.summary.broken += [
                f"{self._transport} seed {self._seed} up to round {number}: w{rank}: {w}"
                for w in wrong
            ]
            if rank == ELDER:
                self.summary.in_use.append(held)
        self._opened.clear()
        self._reached = 0
