"""The physical floor: the best plain code that moves the same bytes, in the same turn.

It is measured by `fabric-perf floor serve` (see `perf.Service`).
A request names a `kind` (copy, pages, cma, flag, futex, ring, tcp-stream, tcp-pingpong, tcp-wake,
tcp-records), `bytes`, `pages`, `operations`, `batches`, `region`, and where they apply `routine`,
`threads`, `temperature`, `memory` (shared or private), `wait` (spin or block), `socket_buffer`,
`answered` (each block of a tcp stream waits for the answer to the one before) and `iovecs`.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.contenders import perf
from benchmarks.harness.cases import MIB, Case
from benchmarks.harness.contender import Effort, Measurement
from fabric_ray.bench import stats
from fabric_ray.bench.results import Family

Candidates = dict[str, dict[str, Any]]


class Floor(perf.ServiceContender):
    """The best plain copy, signal or socket loop with `threads` copying threads."""

    family: Family = "floor"

    def __init__(self, threads: int = 1) -> None:
        self.name = "floor" if threads == 1 else f"floor x{threads}"
        self.threads = threads
        self._routines: list[str] = []

    def available(self) -> str | None:
        cores = len(os.sched_getaffinity(0))
        if cores < self.threads:
            return f"needs {self.threads} cores, {cores} are allowed"
        return super().available()

    def supports(self, case: Case) -> bool:
        if self.threads == 1:
            return case.operation != "window"
        shared = case.link == "shm" and case.memory == "library"
        return case.operation == "write" and shared and case.bytes >= MIB

    def describe(self, case: Case) -> str:
        if case.operation in ("latency", "rate"):
            return "no payload protocol around it"
        return "best of the candidates in each turn"

    def start(self, case: Case) -> None:
        self.serve("floor", "serve")
        self._routines = self._routines or perf.printed("floor", "routines").split()

    def measure(self, case: Case, effort: Effort) -> Measurement:
        candidates = self._candidates(case)
        request = {
            "bytes": case.bytes,
            "pages": case.pages,
            "temperature": case.temperature,
            "region": case.region,
            "threads": self.threads,
            "operations": effort.operations,
            "batches": max(1, effort.samples // len(candidates)),
        }
        runs: dict[str, list[float]] = {
            name: self.ask({**request, **extra})["seconds"] for name, extra in candidates.items()
        }
        parts = {name: stats.median(seconds) for name, seconds in runs.items()}
        chosen = min(parts, key=lambda name: parts[name])
        return Measurement(seconds=runs[chosen], chosen=chosen, parts=parts)

    def _candidates(self, case: Case) -> Candidates:
        if case.operation == "rate":
            return _TCP_RECORDS if case.link == "tcp" else {"ring": {"kind": "ring"}}
        if case.operation == "latency":
            if case.waiter == "parked":
                return _TCP_WAKE if case.link == "tcp" else {"futex": {"kind": "futex"}}
            return _TCP_PINGPONG if case.link == "tcp" else {"flag": {"kind": "flag"}}
        if case.link == "tcp":
            return _TCP_STREAM
        if case.memory == "ordinary":
            return _cma(case)
        kind = "pages" if case.operation == "pages" else "copy"
        return {name: {"kind": kind, "routine": name} for name in self._routines}


def _waits(kind: str) -> Candidates:
    return {f"{kind} {wait}": {"kind": kind, "wait": wait} for wait in ("spin", "block")}


_TCP_RECORDS: Candidates = {
    f"{name}, {count} a send": {**wait, "pages": count}
    for name, wait in _waits("tcp-records").items()
    for count in (1, 64)
}
_TCP_WAKE: Candidates = {"tcp-wake": {"kind": "tcp-wake"}}
_TCP_PINGPONG = _waits("tcp-pingpong")
_TCP_STREAM: Candidates = {
    f"{name}, {'default' if buffer == 0 else '2 MiB'} buffers": {**wait, "socket_buffer": buffer}
    for name, wait in _waits("tcp-stream").items()
    for buffer in (0, 2 * MIB)
}


def _cma(case: Case) -> Candidates:
    """One block is one call anyway; pages are tried with several numbers a call."""
    counts = (1,) if case.pages == 1 else (64, 256, 1024)
    return {
        f"cma, {count} a call": {"kind": "cma", "memory": "private", "iovecs": count}
        for count in counts
    }
