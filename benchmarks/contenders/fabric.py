"""Ourselves: the engine in Rust between two processes, and from Python."""

from __future__ import annotations

import ctypes.util
import os
from typing import Any

import msgspec

from benchmarks.contenders import perf
from benchmarks.harness.cases import MIB, WINDOW, Case
from benchmarks.harness.contender import Effort, Measurement
from benchmarks.harness.pair import PairContender
from fabric_ray.bench import stats
from fabric_ray.bench.results import ContenderError

BATCH = 64
_REST_US = 1000
# Long enough for the engines' workers of the sample before to have gone to sleep.
_SETTLE_US = 200
_WAITERS = ("poll-python", "callback-python", "asyncio", "parked")
# By waiter: what the service calls it, and what a table says of it.
_NOTICES = {
    "spin-native": ("spin", "polls its counter"),
    "callback-native": ("callback", "has a callback"),
    "parked": ("wait", "waits"),
}


class FabricRust(perf.ServiceContender):
    """`fabric-perf engine serve`: no Python between the engine and the clock."""

    def __init__(
        self, name: str, *, threads: int = 1, batch: bool = False, heals: bool = True
    ) -> None:
        self.name = name
        self.threads = threads
        # Without healing it is what healing is measured by.
        self.family = "ours" if heals else "floor"
        self._batch = batch
        self._heals = heals

    def supports(self, case: Case) -> bool:
        if not self._heals:
            return case.suite == "healing"
        if self._batch:
            return case.operation == "rate" and case.language == "native"
        if self.threads > 1:
            large = case.operation == "write" and case.bytes >= 32 * MIB
            return large and case.link == "shm" and case.memory == "library"
        if case.operation == "latency":
            return case.waiter in _NOTICES
        if case.operation == "rate":
            return case.language == "native"
        return case.operation in ("write", "pages", "flight")

    def describe(self, case: Case) -> str:
        if not self._heals:
            return "no retry, no revival"
        if case.operation == "rate":
            return f"{BATCH} writes a submit" if self._batch else "one write a submit"
        if case.operation == "latency":
            return f"the receiver {_NOTICES[case.waiter or 'parked'][1]}"
        if case.link == "tcp":
            return "two streams"
        path = "process_vm_writev" if case.memory == "ordinary" else "mapped memory"
        return f"{path}, {self.threads} copying thread{'s'[: self.threads - 1]}"

    def transport(self, case: Case) -> str:
        """The engine's."""
        return case.link

    def options(self, case: Case) -> list[str]:
        """Further options of `fabric-perf engine serve`."""
        foreign = ["--foreign"] if case.memory == "ordinary" else []
        return [*foreign, *([] if self._heals else ["--no-heal"])]

    def start(self, case: Case) -> None:
        room = ["--copy-threads", str(self.threads), "--region", str(case.region)]
        transport = ["--transport", self.transport(case), *self.options(case)]
        self.serve("engine", "serve", *transport, *room)

    def verify(self, case: Case) -> bool:
        """The receiving process zeroes its region before and compares all of it afterwards."""
        self._seconds(case, Effort(operations=min(case.operations, 64), samples=1), verify=True)
        return True

    def measure(self, case: Case, effort: Effort) -> Measurement:
        return Measurement(seconds=self._seconds(case, effort))

    def _seconds(self, case: Case, effort: Effort, **extra: Any) -> list[float]:
        common = {"bytes": case.bytes, "temperature": case.temperature, "rest_us": _SETTLE_US}
        request = {**common, **self._request(case), **msgspec.structs.asdict(effort), **extra}
        reply = self.ask(request)
        if reply["transport"] != self.transport(case):
            went, wanted = reply["transport"], self.transport(case)
            raise ContenderError(f"it went over {went}, not over {wanted}")
        seconds: list[float] = reply["seconds"]
        return seconds

    def _request(self, case: Case) -> dict[str, Any]:
        match case.operation:
            case "rate" if self._batch or case.label == "batch":
                return {"kind": "batch", "pages": BATCH}
            case "rate":
                return {"kind": "rate"}
            case "pages":
                return {"kind": "pages", "pages": case.pages}
            case "window":
                return {"kind": "window", "pages": WINDOW}
            case "flight":
                return {"kind": "window", "pages": case.window, "threads": case.submitters}
            case "latency" if case.waiter == "spin-native":
                return {"kind": "echo"}
            case "latency":
                notice, _ = _NOTICES[case.waiter or "parked"]
                rest = _REST_US if case.waiter == "parked" else 0
                return {"kind": "write", "notice": notice, "rest_us": rest}
            case _:
                return {"kind": "write"}


class FabricLibfabric(FabricRust):
    """`fabric-perf engine serve` over the provider of the case's link, which needs no NIC."""

    obtain = f"{FabricRust.obtain}; apt-get install libfabric1"

    def __init__(self) -> None:
        super().__init__("fabric-rust libfabric")

    def available(self) -> str | None:
        named = os.environ.get("FABRIC_RAY_LIBFABRIC")
        if not named and ctypes.util.find_library("fabric") is None:
            return "libfabric is not installed"
        return super().available()

    def supports(self, case: Case) -> bool:
        return case.operation == "window"

    def describe(self, case: Case) -> str:
        return f"libfabric's {case.link} provider, {WINDOW} counted writes in flight"

    def transport(self, case: Case) -> str:
        del case
        return "libfabric"

    def options(self, case: Case) -> list[str]:
        return ["--provider", case.link]


class FabricRecorder(FabricRust):
    """With and without flight records, in new processes each turn: where a process's memory comes
    to lie makes it some percent faster or slower for as long as it lives. Other work can only make
    a sample longer, so a turn is the time that the fastest tenth of its samples keep."""

    def __init__(self, *, records: bool) -> None:
        super().__init__("recorder" if records else "recorder off")
        self.family = "ours" if records else "floor"
        self._records = records

    def supports(self, case: Case) -> bool:
        return case.suite == "observe"

    def describe(self, case: Case) -> str:
        return "the time that a tenth of the samples keep"

    def options(self, case: Case) -> list[str]:
        return [] if self._records else ["--no-records"]

    def measure(self, case: Case, effort: Effort) -> Measurement:
        self.start(case)
        seconds = sorted(super().measure(case, effort).seconds)
        parts = {"median": stats.median(seconds)}
        return Measurement(seconds=[seconds[len(seconds) // 10]], parts=parts)

    def pause(self) -> None:
        self.stop()


class KvPages(PairContender):
    """From the first layer that is said to be computed to the last page at the decoder. Requests
    are made, and accepted, before the clock starts, as peers' transfers are."""

    name = "fabric-kv"
    family = "ours"
    module = "benchmarks.contenders.fabric_kv"
    sender, target = "PrefillEnd", "DecodeEnd"
    pausable = False  # both ends park by themselves, and beats go on

    def supports(self, case: Case) -> bool:
        return case.suite == "kv"

    def describe(self, case: Case) -> str:
        return "Prefiller and Decoder from Python, layer by layer, one copying thread"


class FabricPython(PairContender):
    family = "ours"
    module = "benchmarks.contenders.fabric_python"
    pausable = False  # both ends park by themselves

    def __init__(self, name: str, *, batch: bool = False) -> None:
        self.name = name
        self._batch = batch
        self.sender = self.target = "BatchEnd" if batch else "End"

    def supports(self, case: Case) -> bool:
        if case.operation == "rate":
            return case.language == "python"
        if self._batch:
            return False
        if case.operation == "latency":
            return case.waiter in _WAITERS
        return case.operation in ("write", "pages")

    def describe(self, case: Case) -> str:
        if case.operation == "rate":
            return f"prepared batches of {BATCH}" if self._batch else "one write a call"
        if case.operation == "latency":
            return "Python at both ends"
        return "Python at both ends, one copying thread"
