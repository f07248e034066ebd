"""One rank of an exchange whose kernels run on the processor, in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from fabric_ray import TransferEngine
from fabric_ray.kernels import structs
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.steps import StepKind
from fabric_ray.moe import AllToAll
from tests.host_kernels import Host, StepByStep
from tests.moe_ranks import batch, layer
from tests.processes import within

EXPERTS, TOPK, HIDDEN, TOKENS = 6, 3, 64, 16


class Dying(StepByStep):
    """Comes to a step of a kind for the second time, does half of that, and ``kill -9``."""

    def __init__(self, launcher: Launcher, kind: StepKind) -> None:
        super().__init__(launcher)
        self._kind, self._left = kind, 2

    def step(self, step: structs.Step, launch: Callable[[], None]) -> None:
        last = step.kind == self._kind and self._left == 1
        self._left -= step.kind == self._kind
        if last:
            packs = self._kind == StepKind.PACK_ROWS
            rows = step.arguments.pack.part[0] if packs else step.arguments.answers.answers
            rows.width //= 2
        launch()
        if last:
            os.kill(os.getpid(), signal.SIGKILL)


def is_straight(a: AllToAll) -> bool:
    """Whether its kernels store to all others."""
    ways = [line for line in a.explain().splitlines() if line.startswith("rows to rank")]
    return len(ways) == a.ranks - 1 and all("stored by" in way for way in ways)


def serve(
    connection: Connection,
    rank: int,
    ranks: int,
    build: Path,
    dies_at: StepKind | None,
    private: int,
) -> None:
    """Exchanges by seeds, until it is told to stop, or dies."""
    launcher: Launcher = Host(build)
    if dies_at is not None:
        launcher = Dying(launcher, dies_at)
    with TransferEngine(name=f"rank-{rank}", transport="shm", token=b"direct") as engine:
        a = AllToAll(
            engine, rank=rank, ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
            max_tokens=TOKENS, launcher=launcher, timeout=20.0, private_rows=private,
        )  # fmt: skip
        connection.send(a.descriptor())
        a.connect(connection.recv())
        within(30, "all can be stored to", lambda: is_straight(a))
        connection.send(None)
        while (seed := connection.recv()) is not None:
            sums = layer(a, *batch(seed + rank, TOKENS, EXPERTS, TOPK, HIDDEN))
            connection.send((sums, a.left_out, [lost.rank for lost in a.lost]))
