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

from benchmarks.harness import ends
from benchmarks.harness.cases import Case, Link
from benchmarks.harness.data import pages_in, step
from benchmarks.harness.pair import PairContender

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


class End(ends.End):
    """An agent with one registered region; both ends can write to the other."""

    def __init__(self, sync: ends.Sync, sends: bool, config: _Config) -> None:
        super().__init__(sync, sends)
        self._config = config
        # The sender may still need this end's progress to see its last completion.
        self.progress = self._arrived
        self._peer = ""
        self._registered: Any = None
        self._lists: list[Any] = []
        self._made: list[Any] = []

    def open(self) -> bytes:
        api = importlib.import_module("nixl._api")
        threads = self._config.progress_thread
        config = api.nixl_agent_config(enable_prog_thread=threads, backends=[])
        self._agent: Any = api.nixl_agent("sender" if self.sends else "target", config)
        self._agent.create_backend("UCX", self._config.parameters)
        return b""

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
        sides = {"NIXL_INIT_AGENT": self.memory.ctypes.data, self._peer: address}
        self._lists = [self._pages(agent, case, at) for agent, at in sides.items()]

    def _pages(self, agent: str, case: Case, address: int) -> Any:
        count = pages_in(case)
        pages = np.zeros((count, 3), dtype=np.uint64)
        pages[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(case.bytes)
        pages[:, 1] = case.bytes
        return self._agent.prep_xfer_dlist(agent, pages, "DRAM")

    def ready(self, case: Case, operations: int) -> Sequence[Any]:
        if case.operation == "latency":
            return [self.operation(case, 0)] * operations
        if not self.sends:
            return range(operations)
        if case.operation == "rate":
            ring = [self.operation(case, 0) for _ in range(_IN_FLIGHT)]
            return [ring[number % _IN_FLIGHT] for number in range(operations)]
        return super().ready(case, operations)

    def operation(self, case: Case, number: int) -> Any:
        sources, targets = (pages.astype(np.int32) for pages in step(case, number))
        near, far = self._lists
        transfer = self._agent.make_prepped_xfer(
            "WRITE", near, sources, far, targets, b"n", skip_desc_merge=True
        )
        self._made.append(transfer)
        return transfer

    def move(self, operation: Any) -> None:
        if not _done(self._agent.transfer(operation)):
            self._finish(operation)

    def stream(self, operations: Sequence[Any]) -> None:
        busy: dict[int, Any] = {}
        for number, operation in enumerate(operations):
            slot = number % _IN_FLIGHT
            if slot in busy:
                self._finish(busy.pop(slot))
            if not _done(self._agent.transfer(operation)):
                busy[slot] = operation
        for operation in busy.values():
            self._finish(operation)

    def _finish(self, operation: Any) -> None:
        state = self._agent.check_xfer_state
        ends.spin(lambda: _done(state(operation)), "a transfer's completion")

    def arrive(self, operations: Sequence[Any]) -> None:
        left = len(operations)
        end = time.monotonic() + ends.PATIENCE
        while left > 0:
            got = self._arrived()
            left -= got
            if not got and time.monotonic() > end:
                raise TimeoutError(f"{left} of {len(operations)} notifications did not arrive")

    def _arrived(self) -> int:
        """Notifications since the last call; also makes progress."""
        found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return sum(len(messages) for messages in found.values())

    def settle(self) -> None:
        for transfer in self._made:
            self._agent.release_xfer_handle(transfer)
        self._made = []


def _done(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("NIXL ended a transfer with ERR")
    return state == "DONE"
