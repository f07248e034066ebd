"""One rank of an exchange whose kernels run on the processor, in a process of its own."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fabric_ray import TransferEngine
from fabric_ray.kernels.launch import Launcher
from fabric_ray.moe import AllToAll
from tests.host_kernels import Host
from tests.moe_ranks import batch, layer
from tests.processes import within

EXPERTS, TOPK, HIDDEN, TOKENS = 6, 3, 64, 16


class Dying:
    """Launches until it comes to a kernel for the second time: half of that, and ``kill -9``."""

    def __init__(self, launcher: Launcher, kernel: str) -> None:
        self._launcher, self._kernel, self._left = launcher, kernel, 2

    def launch(
        self, file: str, kernel: str, grid: tuple[int, int], threads: int, arguments: Any
    ) -> None:
        if kernel == self._kernel:
            self._left -= 1
            if self._left == 0:
                rows = arguments.part[0] if kernel == "pack_rows" else arguments.answers
                rows.width //= 2
                self._launcher.launch(file, kernel, grid, threads, arguments)
                os.kill(os.getpid(), signal.SIGKILL)
        self._launcher.launch(file, kernel, grid, threads, arguments)


def is_straight(a: AllToAll) -> bool:
    """Whether its kernels store to all others."""
    ways = [line for line in a.explain().splitlines() if line.startswith("rows to rank")]
    return len(ways) == a.ranks - 1 and all("stored by" in way for way in ways)


def serve(
    connection: Connection, rank: int, ranks: int, build: Path, dies_at: str | None, private: int
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
