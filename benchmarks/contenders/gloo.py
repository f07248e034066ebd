"""gloo through torch.distributed: send and recv over loopback TCP."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from benchmarks.harness.cases import Case
from benchmarks.harness.data import step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import Role, SenderRole, Sync, TargetRole


class Gloo(PairContender):
    name = "gloo"
    obtain = "pip install torch"
    env: ClassVar[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def available(self) -> str | None:
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    def supports(self, case: Case) -> bool:
        if case.link != "tcp" or case.memory != "library":
            return False
        if case.operation == "latency":
            return case.waiter == "poll-python"
        if case.operation == "rate":
            return case.language == "python"
        return case.operation == "write"

    def describe(self, case: Case) -> str:
        return "isend, one recv each" if case.operation == "rate" else "send, recv"


class _Gloo(Role):
    rank: int

    def __init__(self, sync: Sync) -> None:
        super().__init__(sync)
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._torch: Any = importlib.import_module("torch")

    def open(self) -> bytes:
        """Rank 0 names the file in which the two find each other."""
        if self.rank == 1:
            return b""
        handle, path = tempfile.mkstemp(prefix="bench-gloo-")
        os.close(handle)
        os.unlink(path)
        self._path = path
        return path.encode()

    def connect(self, peer: bytes) -> None:
        path = peer.decode() or self._path
        self._distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=self.rank, world_size=2
        )
        self._distributed.barrier()
        if self.rank == 0:
            os.unlink(path)

    def prepare(self, case: Case) -> bytes:
        if self.ordinary(case):
            self._tensor: Any = self._torch.from_numpy(self.memory)
        return b""

    def _blocks(self, case: Case, operations: int) -> list[Any]:
        steps = (step(case, self.moved + number) for number in range(operations))
        places = (int(one.sources[0]) * case.bytes for one in steps)
        return [self._tensor[at : at + case.bytes] for at in places]

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Sender(_Gloo, SenderRole):
    rank = 0

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        blocks, gloo = self._blocks(case, operations), self._distributed

        def move() -> None:
            if case.operation == "rate":
                for work in [gloo.isend(block, 1) for block in blocks]:
                    work.wait()
                return
            for block in blocks:
                gloo.send(block, 1)
                if case.operation == "latency":
                    gloo.recv(block, 1)

        return move


class Target(_Gloo, TargetRole):
    rank = 1

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        blocks, gloo = self._blocks(case, operations), self._distributed

        def arrive() -> None:
            for block in blocks:
                gloo.recv(block, 0)
                if case.operation == "latency":
                    gloo.send(block, 0)

        return arrive
