"""NIXL over UCX, in four configurations.

Transfers are prepared before the clock starts (NIXL can re-post a prepared transfer), so a figure
holds the post, the bytes and the notification, and not the making of the request.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.cases import Case, Link
from benchmarks.harness.data import pages_in, step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import PATIENCE, Role, SenderRole, Sync, TargetRole, spin

_IN_FLIGHT = 64


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    progress_thread: bool
    parameters: dict[str, str] = {}


class Nixl(PairContender):
    obtain = "pip install -e '.[bench]'"

    def __init__(self, name: str, config: _Config, link: Link = "shm") -> None:
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
        return case.operation == "pages" or (
            case.operation == "write" and (case.memory == "library" or self.link == "shm")
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
        self._made: list[Any] = []

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
        if self.ordinary(case, lambda: self._agent.deregister_memory(self._registered)):
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
        sources, targets = (pages.astype(np.int32) for pages in step(case, number))
        transfer = self._agent.make_prepped_xfer(
            "WRITE", self._near, sources, self._far, targets, b"n", skip_desc_merge=True
        )
        self._made.append(transfer)
        return transfer

    def post(self, transfer: Any) -> bool:
        """Start it; True when it is complete already."""
        return _done(self._agent.transfer(transfer))

    def move(self, transfer: Any) -> None:
        if not self.post(transfer):
            self.finish(transfer)

    def finish(self, transfer: Any) -> None:
        state = self._agent.check_xfer_state
        spin(lambda: _done(state(transfer)), "a transfer's completion")

    def settle(self) -> None:
        for transfer in self._made:
            self._agent.release_xfer_handle(transfer)
        self._made = []

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


def _done(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("NIXL ended a transfer with ERR")
    return state == "DONE"


class Sender(_End, SenderRole):
    name = "sender"

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        if case.operation == "latency":
            ping = self.make(case, 0)
            return lambda: self._ping(ping, operations)
        if case.operation == "rate":
            ring = [self.make(case, 0) for _ in range(_IN_FLIGHT)]
            return lambda: self._stream(ring, operations)
        transfers = [self.make(case, self.moved + number) for number in range(operations)]
        return lambda: self._move(transfers)

    def _move(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            self.move(transfer)

    def _ping(self, transfer: Any, operations: int) -> None:
        for _ in range(operations):
            self.move(transfer)
            self.await_arrivals(1)

    def _stream(self, ring: list[Any], operations: int) -> None:
        busy = [False] * len(ring)
        for number in range(operations):
            slot = number % len(ring)
            if busy[slot]:
                self.finish(ring[slot])
            busy[slot] = not self.post(ring[slot])
        for slot, transfer in enumerate(ring):
            if busy[slot]:
                self.finish(transfer)


class Target(_End, TargetRole):
    name = "target"

    def __init__(self, sync: Sync, config: _Config) -> None:
        super().__init__(sync, config)
        # The sender may still need this end's progress to see its last completion.
        self.progress = self.arrived

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        if case.operation != "latency":
            return lambda: self.await_arrivals(operations)
        answer = self.make(case, 0)
        return lambda: self._echo(answer, operations)

    def _echo(self, answer: Any, operations: int) -> None:
        for _ in range(operations):
            self.await_arrivals(1)
            self.move(answer)
