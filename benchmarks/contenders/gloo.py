"""gloo through torch.distributed: send and recv over loopback TCP."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from benchmarks.harness import ends
from benchmarks.harness.cases import Case
from benchmarks.harness.data import step
from benchmarks.harness.pair import PairContender


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


class End(ends.End):
    def open(self) -> bytes:
        """The sender names the file in which the two find each other."""
        self._gloo: Any = importlib.import_module("torch.distributed")
        self._path = tempfile.mktemp(prefix="bench-gloo-") if self.sends else ""
        return self._path.encode()

    def connect(self, peer: bytes) -> None:
        path = peer.decode() or self._path
        self._peer = int(self.sends)
        self._gloo.init_process_group(
            "gloo", init_method=f"file://{path}", rank=1 - self._peer, world_size=2
        )
        self._gloo.barrier()
        if self.sends:
            os.unlink(path)

    def prepare(self, case: Case) -> bytes:
        if self.ordinary(case):
            torch: Any = importlib.import_module("torch")
            self._tensor: Any = torch.from_numpy(self.memory)
        return b""

    def operation(self, case: Case, number: int) -> Any:
        at = int(step(case, number).sources[0]) * case.bytes
        return self._tensor[at : at + case.bytes]

    def move(self, operation: Any) -> None:
        self._gloo.send(operation, self._peer)

    def stream(self, operations: Sequence[Any]) -> None:
        for work in [self._gloo.isend(block, self._peer) for block in operations]:
            work.wait()

    def arrive(self, operations: Sequence[Any]) -> None:
        for block in operations:
            self._gloo.recv(block, self._peer)

    def close(self) -> None:
        self._gloo.destroy_process_group()
