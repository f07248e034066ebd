"""From a store to the word that counts layers to the first post, and to a Python callback
(fabric-lib, table 4), beside what this machine's own threads take to notice each other."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator

from benchmarks.contenders import perf
from fabric_ray import TransferEngine
from fabric_ray.bench import stats
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import Row, RowHeader, make_figure, make_row

_PATIENCE = 10.0
_GAP_S = 60e-6
_REST_S = 2e-3
_RESTED_SHARE = 20
PYTHON = "Python callback"
# What `fabric-perf watch` tells of each sample.
_NATIVE = {"callback": "Rust callback", "post": "first post", "rung": "decoder woken"}
# Medians in us of fabric-lib, where a kernel on a GPU stores.
PAPER = {"first post": 6.2, PYTHON: 9.3}
AIMS_US = {"first post": 5, PYTHON: 12}

WAYS = {
    "spinning": "a plain store while the watching thread still looks (200 us after a change)",
    "woken": "Watcher.store to a watching thread that sleeps",
    "napping": "a plain store, seen when the thread's nap ends",
    "outside": "as spinning, by another process (process_vm_writev), which, like a GPU, has no part"
    " in the interpreter",
}


def watcher(turns: int, samples: int, results: Results) -> None:
    """All ways, each beside a flag between threads that spin, or a futex that wakes one.

    Args:
        turns: rounds.
        samples: of each way in a round; of those that rest before each, a twentieth.
        results: where rows go.
    """
    native = perf.Service(["watch"])
    floors = perf.Service(["floor", "serve"])
    try:
        with _Called() as called:
            for way in WAYS:
                if not results.has(f"watcher/{way}, {PYTHON}"):
                    results.say(way)
                    results.add(*_measure(way, turns, samples, native, floors, called))
    finally:
        native.stop()
        floors.stop()


def _measure(
    way: str,
    turns: int,
    samples: int,
    native: perf.Service,
    floors: perf.Service,
    called: _Called,
) -> Iterator[Row]:
    spins = way in ("spinning", "outside")
    count, kind = (samples, "flag") if spins else (max(1, samples // _RESTED_SHARE), "futex")
    found: dict[str, list[list[float]]] = {}
    plain: list[list[float]] = []
    for _ in range(turns):
        if way != "outside":
            reply = native.ask({"way": way, "samples": count})
            for key, name in _NATIVE.items():
                found.setdefault(name, []).append([ns / 1e9 for ns in reply[key]])
        noticed = called.measure_outside if way == "outside" else called.measure
        found.setdefault(PYTHON, []).append(noticed(way, count))
        request = {"kind": kind, "operations": 1, "batches": count}
        plain.append(floors.ask(request)["seconds"])
    for name, taken in found.items():
        aim = f"{AIMS_US[name]} us" if spins and name in AIMS_US else ""
        header = RowHeader(key=f"watcher/{way}, {name}", unit="us", aim=aim)
        tails = stats.spread([seconds * 1e6 for turn in taken for seconds in turn])
        figures = [
            make_figure(header, "ours", "ours", taken, note=WAYS[way], details=tails),
            make_figure(header, kind, "floor", plain),
        ]
        if spins and name in PAPER:
            figures.append(make_figure(header, "paper", "peer", [[PAPER[name] / 1e6]]))
        yield make_row(header, figures)


class _Called:
    """A Python callback on a word of its own, and a thread that stores to it."""

    def __init__(self) -> None:
        self._engine = TransferEngine(name="watched", transport="shm")
        self._come = threading.Semaphore(0)
        self._at = 0
        self._word = self._engine.watch(self._on_change)
        self._value = ctypes.c_uint64(0)
        self._noted: list[tuple[int, int]] = []
        self._noting = self._engine.watch(self._note)
        self._outside = perf.Service(
            ["store", "--pid", str(os.getpid()), "--addr", str(self._noting.addr)]
        )

    def __enter__(self) -> _Called:
        return self

    def __exit__(self, *exc: object) -> None:
        self._outside.stop()
        self._engine.close()

    def _on_change(self, old: int, new: int) -> None:
        self._at = time.monotonic_ns()
        self._come.release()

    def measure(self, way: str, samples: int) -> list[float]:
        """Seconds of each sample. The storing thread lets go of the interpreter right after
        its store, as one that launches kernels does."""
        taken = []
        for _ in range(samples):
            self._rest(way)
            self._value.value = self._word.value + 1
            stored = time.monotonic_ns()
            if way == "woken":
                self._word.store(self._value.value)
            else:
                ctypes.memmove(self._word.addr, ctypes.byref(self._value), 8)
            if not self._come.acquire(timeout=_PATIENCE):
                raise TimeoutError("no callback noticed that the word has changed")
            taken.append((self._at - stored) / 1e9)
        return taken

    def _note(self, old: int, new: int) -> None:
        self._noted.append((new, time.monotonic_ns()))

    def measure_outside(self, way: str, samples: int) -> list[float]:
        """Seconds of each sample; values that went by unseen were noticed with the next."""
        first = self._noting.value + 1
        self._noted.clear()
        asked = {"first": first, "samples": samples, "rest_us": round(_GAP_S * 1e6)}
        stored = self._outside.ask(asked)["stored"]
        end = time.monotonic() + _PATIENCE
        while not self._noted or self._noted[-1][0] < first + samples - 1:
            if time.monotonic() > end:
                raise TimeoutError("no callback noticed that the word has changed")
            time.sleep(_REST_S)
        noticed = iter(self._noted)
        value, at = next(noticed)
        taken = []
        for number, before in enumerate(stored, first):
            while value < number:
                value, at = next(noticed)
            taken.append((at - before) / 1e9)
        return taken

    def _rest(self, way: str) -> None:
        # Asleep: there may be no core for one more thread that looks.
        time.sleep(_GAP_S if way == "spinning" else _REST_S)
