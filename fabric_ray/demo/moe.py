"""The demo of expert parallelism: ranks are started, compared, one is killed and replaced."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from fabric_ray.demo.common import cluster, plain, print_checks
from fabric_ray.demo.moe_model import EXPERTS, SEQUENCE, Reader, exchange_sizes, model, rank_model
from fabric_ray.demo.options import Moe as Options
from fabric_ray.errors import FabricError
from fabric_ray.moe.group import ExpertGroup, Forward

_CPUS = 0.01
"""Ray keeps no place that takes nothing, and the demo has to fit on any machine."""
_KILL_S = 60.0


class Phase(msgspec.Struct, frozen=True):
    """Some steps with the same ranks."""

    name: str
    left_out: tuple[int, ...]
    """Experts."""
    steps: int
    tokens: int
    """That were read, on all ranks."""
    seconds: tuple[float, ...]
    """Of each step, as the controller saw it."""
    logits: int
    """Numbers that were compared."""
    wrong: int
    """Of those, how many differ from the model in one place in any bit."""

    @property
    def equal(self) -> bool:
        return self.wrong == 0 and self.logits > 0


class Loss(msgspec.Struct, frozen=True):
    """The rank that was killed, and what became known of it."""

    rank: int
    pid: int
    named: tuple[int, ...]
    """Ranks that were given up."""
    by: tuple[int, ...]
    """Ranks that gave it up by themselves."""
    cause: str
    seconds: float
    """From the kill until the group knew."""
    recovered: float
    """From the kill until the results without it were there."""


class Outcome(msgspec.Struct, frozen=True):
    options: Options
    phases: tuple[Phase, ...]
    loss: Loss
    joined: float
    """Seconds until the rank was replaced."""
    newcomer: bool
    """Whether another actor with another engine replaced it."""
    explanation: str

    @property
    def checks(self) -> dict[str, bool]:
        whole, masked, again = self.phases
        return {
            "every rank's logits are those of the model in one place": whole.equal,
            "the killed rank was named, and no other": self.loss.named == (self.loss.rank,),
            "the others went on without its experts, bit by bit": masked.equal
            and len(masked.left_out) == EXPERTS,
            "a new rank took its place": self.newcomer and not again.left_out,
            "whole again, bit by bit": again.equal,
        }

    @property
    def verified(self) -> bool:
        return all(self.checks.values())

    def summary(self) -> dict[str, Any]:
        """Machine-readable; times are seconds."""
        sizes = exchange_sizes(model(self.options.ranks))
        return {
            "verified": self.verified,
            "checks": self.checks,
            "ranks": self.options.ranks,
            **{name: sizes[name] for name in ("experts", "topk", "hidden")},
            "phases": [
                msgspec.to_builtins(phase)
                | {"equal": phase.equal, "step_seconds": statistics.median(phase.seconds)}
                for phase in self.phases
            ],
            "loss": msgspec.to_builtins(self.loss),
            "joined_seconds": self.joined,
        }

    def show(self, console: Console) -> None:
        """Prints the tables and the verdict."""
        table = plain()
        for name in ("phase", "without experts", "tokens", "steps", "step [dim]ms[/]"):
            table.add_column(name, justify="right", no_wrap=True)
        for phase in self.phases:
            gone = phase.left_out
            table.add_row(
                phase.name,
                f"{gone[0]} to {gone[-1]}" if gone else "",
                str(phase.tokens),
                str(phase.steps),
                f"{statistics.median(phase.seconds) * 1e3:.0f}",
            )
        console.print(table)
        loss = self.loss
        by = ", ".join(f"rank {rank}" for rank in loss.by) or "Ray"
        console.print(
            f"kill -9 of rank {loss.rank}: named by {by} after {loss.seconds:.2f} s, results "
            f"without it after {loss.recovered:.2f} s; replaced within {self.joined:.1f} s"
        )
        console.print(f"its cause: {loss.cause}", highlight=False, markup=False)
        memory = next(s for s in self.explanation.splitlines() if s.endswith("bytes in all"))
        console.print(f"exchange memory of each rank: {memory.strip()}", highlight=False)
        print_checks(self.checks, console)


class Killer:
    """A Ray actor on the host of a process that it ends."""

    def kill(self, pid: int, after: float) -> float:
        """Sends SIGKILL after some seconds; returns when, seconds since the epoch."""
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        return time.time()


def run(options: Options, tell: Callable[[str], None] = lambda _: None) -> Outcome:
    """Runs it all.

    Raises:
        InvalidArgument: an option that it can't have.
        FabricError: the ranks didn't come up.
    """
    options.check()
    with cluster(options.address):
        tell(f"starting {options.ranks} ranks, each an actor with an engine of its own")
        config = model(options.ranks)
        group = ExpertGroup(
            partial(rank_model, config, options.seed),
            ranks=options.ranks,
            exchange=exchange_sizes(config),
            timeout=options.timeout,
            cpus_per_rank=_CPUS,
            engine={"transport": options.transport},
        )
        with group:
            return _Run(options, group, tell).outcome()


class _Run:
    def __init__(self, options: Options, group: ExpertGroup, tell: Callable[[str], None]) -> None:
        self._options, self._group, self._tell = options, group, tell
        self._whole = Reader(model(options.ranks), options.seed)
        self._draw = random.Random(options.seed)
        where = NodeAffinitySchedulingStrategy(group.members[-1].node_id, soft=False)
        remote: Any = ray.remote(Killer)
        self._killer = remote.options(num_cpus=0, scheduling_strategy=where).remote()

    def outcome(self) -> Outcome:
        explanation = self._group.explain()
        whole = self._phase("whole")
        self._tell("killing a rank in the middle of a step")
        loss = self._kill(min(whole.seconds))
        self._tell(f"rank {loss.rank} was named after {loss.seconds:.2f} s: {loss.cause}")
        masked = self._phase("masked")
        self._tell(f"a new actor takes the place of rank {loss.rank}")
        ray.kill(self._killer)
        begin = time.monotonic()
        member = self._group.join()
        joined = time.monotonic() - begin
        phases = whole, masked, self._phase("whole again")
        newcomer = member.rank == loss.rank and member.pid != loss.pid
        return Outcome(self._options, phases, loss, joined, newcomer, explanation)

    def _phase(self, name: str) -> Phase:
        """Some steps, each compared with the model in one place."""
        options, group = self._options, self._group
        self._tell(f"{name}: {options.steps} steps of {options.tokens} tokens on each rank")
        seconds, tokens, logits, wrong = [], 0, 0, 0
        for _ in range(options.steps):
            batch = self._batch()
            begin = time.monotonic()
            found = group.forward(batch)
            seconds.append(time.monotonic() - begin)
            tokens += sum(map(len, batch))
            for rows, sequence in zip(found.outputs, batch, strict=True):
                logits += rows.numel()
                wrong += int(torch.ne(rows, self._whole(sequence, found.left_out)).sum())
        return Phase(name, group.left_out, options.steps, tokens, tuple(seconds), logits, wrong)

    def _kill(self, step: float) -> Loss:
        """Kills a rank half a step after one has begun, and has the group find out."""
        victim = self._group.members[-1]
        killed = self._killer.kill.remote(victim.pid, step / 2)
        deadline = time.monotonic() + _KILL_S
        found: Forward | None = None
        while found is None or not found.lost:
            # A step that was quicker than the kill knows nothing of it.
            if time.monotonic() > deadline:
                raise FabricError(f"the kill of process {victim.pid} went unnoticed")
            found = self._group.forward(self._batch())
            ended = time.time()
        at = ray.get(killed)
        by_rank = {one.rank: one for one in found.lost}
        one = by_rank.get(victim.rank, found.lost[0])
        return Loss(
            rank=victim.rank,
            pid=victim.pid,
            named=tuple(sorted(by_rank)),
            by=one.named_by,
            cause=one.cause,
            seconds=one.at - at,
            recovered=ended - at,
        )

    def _batch(self) -> list[list[int]]:
        """As many tokens for each rank as are asked for, in sequences of any length."""
        vocab = model(self._options.ranks).vocab
        lengths = []
        for _ in range(self._options.ranks):
            left = self._options.tokens
            while left:
                lengths.append(min(left, self._draw.randint(SEQUENCE // 2, SEQUENCE)))
                left -= lengths[-1]
        return [[self._draw.randrange(vocab) for _ in range(n)] for n in lengths]
