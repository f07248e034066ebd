"""NIXL over UCX, in four configurations.

Transfers are prepared before the clock starts (NIXL can re-post a prepared transfer), so a figure
holds the post, the bytes and the notification, and not the making of the request.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.cases import Case, Link
from benchmarks.harness.data import ordinary_memory, pages_in, step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import PATIENCE, Role, Stamps, Sync, spin

_IN_FLIGHT = 64


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    progress_thread: bool
    parameters: dict[str, str] = {}


class Nixl(PairContender):
    obtain = "pip install -e '.[bench]'"
    sender = "benchmarks.contenders.nixl:Sender"
    target = "benchmarks.contenders.nixl:Target"

    def __init__(self, name: str, config: _Config, link: Link = "shm") -> None:
        super().__init__()
        self.name, self.link, self.arguments = name, link, (config,)
        self.env = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"} if link == "tcp" else {}

    def available(self) -> str | None:
        return None if importlib.util.find_spec("nixl") else "nixl is not installed"

    def supports(self, case: Case) -> bool:
        if case.link != self.link:
            return False
        if case.operation == "latency":
            return case.waiter == "poll-python"
        if case.operation == "rate":
            return case.language == "python"
        return case.operation in ("write", "pages") and (
            case.operation == "pages" or case.memory == "library" or self.link == "shm"
        )

    def describe(self, case: Case) -> str:
        return "prepared transfers, ordinary memory"


def variants() -> list[Nixl]:
    """As installed, with the progress thread on; the fastest that notices a dead peer; and without
    error handling, so that a dead peer is not noticed."""
    no_thread = _Config(progress_thread=False)
    fastest = _Config(progress_thread=False, parameters={"ucx_error_handling_mode": "none"})
    return [
        Nixl("nixl", _Config(progress_thread=True)),
        Nixl("nixl no-thread", no_thread),
        Nixl("nixl fastest", fastest),
        Nixl("nixl tcp", no_thread, "tcp"),
        Nixl("nixl tcp fastest", fastest, "tcp"),
    ]


class _End(Role):
    """An agent with one registered region; both ends can write to the other."""

    name: str

    def __init__(self, sync: Sync, config: _Config) -> None:
        super().__init__(sync)
        self.config = config
        self._peer = ""
        self._registered: Any = None
        self._lists: list[Any] = []

    def open(self) -> bytes:
        api = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=self.config.progress_thread, backends=[])
        self._agent: Any = api.nixl_agent(self.name, config)
        self._agent.create_backend("UCX", self.config.parameters)
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, peer: bytes) -> None:
        self._peer_metadata = peer

    def prepare(self, case: Case) -> bytes:
        if not hasattr(self, "memory") or self.memory.size != case.region:
            if self._registered is not None:
                self._agent.deregister_memory(self._registered)
            self.memory = ordinary_memory(case.region)
            whole = [(self.memory.ctypes.data, self.memory.size, 0, "")]
            self._registered = self._agent.register_memory(whole, "DRAM")
        metadata: bytes = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode((metadata, self.memory.ctypes.data))

    def bind(self, case: Case, description: bytes) -> None:
        metadata, address = msgspec.msgpack.decode(description, type=tuple[bytes, int])
        for old in self._lists:
            self._agent.release_dlist_handle(old)
        # Metadata names the peer's memory, so it is loaded anew when that memory may have moved.
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        loaded = self._agent.add_remote_agent(metadata)
        self._peer = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._near = self._pages("NIXL_INIT_AGENT", case, self.memory.ctypes.data)
        self._far = self._pages(self._peer, case, address)
        self._lists = [self._near, self._far]

    def _pages(self, agent: str, case: Case, address: int) -> Any:
        count = pages_in(case)
        pages = np.zeros((count, 3), dtype=np.uint64)
        pages[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(case.bytes)
        pages[:, 1] = case.bytes
        return self._agent.prep_xfer_dlist(agent, pages, "DRAM")

    def make(self, case: Case, number: int) -> Any:
        """A transfer of operation `number`, ready to be posted."""
        sources, targets = step(case, number)
        return self._agent.make_prepped_xfer(
            "WRITE",
            self._near,
            sources.astype(np.int32),
            self._far,
            targets.astype(np.int32),
            b"n",
            skip_desc_merge=True,
        )

    def post(self, transfer: Any) -> bool:
        """Start it; True when it is complete already."""
        return self._checked(self._agent.transfer(transfer))

    def done(self, transfer: Any) -> bool:
        return self._checked(self._agent.check_xfer_state(transfer))

    def _checked(self, state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("NIXL ended a transfer with ERR")
        return state == "DONE"

    def move(self, transfer: Any) -> None:
        if not self.post(transfer):
            spin(lambda: self.done(transfer), "a transfer's completion")

    def release(self, transfers: Sequence[Any]) -> None:
        for transfer in transfers:
            self._agent.release_xfer_handle(transfer)

    def arrived(self) -> int:
        """Notifications since the last call; also makes progress."""
        found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return sum(len(messages) for messages in found.values())

    def await_arrivals(self, count: int) -> None:
        left = count
        end = time.monotonic() + PATIENCE
        while left > 0:
            got = self.arrived()
            left -= got
            if not got and time.monotonic() > end:
                raise TimeoutError(f"{left} of {count} notifications did not arrive")


class Sender(_End):
    name = "sender"

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        if case.operation == "latency":
            return self._ping(case, operations, samples)
        if case.operation == "rate":
            return self._stream(case, operations, samples)
        starts: list[int] = []
        for _ in range(samples):
            transfers = [self.make(case, self.moved + number) for number in range(operations)]
            self.moved += operations
            self.sync.await_ready()
            starts.append(time.monotonic_ns())
            for transfer in transfers:
                self.move(transfer)
            self.sync.finished()
            self.release(transfers)
        return Stamps(starts=starts)

    def _ping(self, case: Case, operations: int, samples: int) -> Stamps:
        starts: list[int] = []
        ends: list[int] = []
        transfer = self.make(case, 0)
        for _ in range(samples):
            self.sync.await_ready()
            starts.append(time.monotonic_ns())
            for _ in range(operations):
                self.move(transfer)
                self.await_arrivals(1)
            ends.append(time.monotonic_ns())
            self.sync.finished()
        self.release([transfer])
        return Stamps(starts=starts, ends=ends, per_operation=0.5)

    def _stream(self, case: Case, operations: int, samples: int) -> Stamps:
        starts: list[int] = []
        ring = [self.make(case, 0) for _ in range(_IN_FLIGHT)]
        for _ in range(samples):
            self.sync.await_ready()
            busy = [False] * _IN_FLIGHT
            starts.append(time.monotonic_ns())
            for number in range(operations):
                slot = number % _IN_FLIGHT
                transfer = ring[slot]
                if busy[slot]:
                    spin(lambda one=transfer: self.done(one), "a transfer's completion")  # type: ignore[misc]
                busy[slot] = not self.post(transfer)
            for slot, transfer in enumerate(ring):
                if busy[slot]:
                    spin(lambda one=transfer: self.done(one), "a transfer's completion")  # type: ignore[misc]
            self.sync.finished()
        self.release(ring)
        return Stamps(starts=starts)


class Target(_End):
    name = "target"

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        ends: list[int] = []
        latency = case.operation == "latency"
        answer = self.make(case, 0) if latency else None
        for _ in range(samples):
            self.sync.ready()
            if answer is None:
                self.await_arrivals(operations)
                ends.append(time.monotonic_ns())
            else:
                for _ in range(operations):
                    self.await_arrivals(1)
                    self.move(answer)
            # The sender may still need this end's progress to see its last completion.
            self.sync.await_finished(self.arrived)
        if answer is not None:
            self.release([answer])
        return Stamps(ends=ends)
