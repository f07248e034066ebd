"""From a store to the word that counts layers to the first post, and to a Python callback
(fabric-lib, table 4), beside what this machine's own threads take to notice each other."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from benchmarks.contenders import perf
from benchmarks.harness.processes import adopt_orphans
from benchmarks.sheets import Sheet, keeping, spread, verdict
from fabric_ray import TransferEngine

RUST_AIM_US, PYTHON_AIM_US = 5.0, 12.0
PAPER = {"post": (6.2, 7.0, 12.6, 19.4), "python": (9.3, 11.1, 20.4, 41.7)}
"""p50, p90, p99 and p99.9 in microseconds, where a kernel on a GPU stores."""

_PATIENCE = 10.0
_GAP_S = 60e-6
_REST_S = 2e-3
_RESTED_SHARE = 20
_COLUMNS = ("avg", "min", "p50", "p90", "p99", "p99.9", "max")

Samples = dict[str, list[float]]
"""Microseconds by the name of the line."""


def watcher(turns: int, samples: int, say: Callable[[str], None]) -> Sheet:
    """All ways, in turns.

    Args:
        turns: rounds.
        samples: of each way in a round; of those that rest before each, a twentieth.
        say: is told what is being measured.
    """
    adopt_orphans()
    found: Samples = {}
    native = perf.Service(["watch"])
    floors = perf.Service(["floor", "serve"])
    try:
        with _Called() as called, keeping(lambda: _sheet(found)):
            for turn in range(turns):
                say(f"watcher, turn {turn + 1} of {turns}")
                rested = max(1, samples // _RESTED_SHARE)
                for way, count in (("spinning", samples), ("woken", rested), ("napping", rested)):
                    reply = native.ask({"way": way, "samples": count})
                    _add(found, f"{way}: Rust callback", [ns / 1e3 for ns in reply["callback"]])
                    _add(found, f"{way}: first post", [ns / 1e3 for ns in reply["post"]])
                    _add(found, f"{way}: decoder woken", [ns / 1e3 for ns in reply["rung"]])
                    _add(found, f"{way}: Python callback", called.measure(way, count))
                _add(found, "outside: Python callback", called.measure_outside(samples))
                for kind, count in (("flag", samples), ("futex", rested)):
                    reply = floors.ask({"kind": kind, "operations": 1, "batches": count})
                    _add(found, _FLOORS[kind], [one * 1e6 for one in reply["seconds"]])
    finally:
        native.stop()
        floors.stop()
    return _sheet(found)


_FLOORS = {
    "flag": "floor: a flag between spinning threads",
    "futex": "floor: a futex wakes a thread that sleeps",
}
_WAYS = {
    "spinning": "a plain store while the watching thread still looks (200 us after a change)",
    "woken": "Watcher.store to a watching thread that sleeps",
    "napping": "a plain store, seen when the thread's nap ends",
    "outside": "as spinning, by another process (process_vm_writev), which, like a GPU, has no part"
    " in the interpreter",
}


def _add(found: Samples, name: str, values: list[float]) -> None:
    found.setdefault(name, []).extend(values)


def _sheet(found: Samples) -> Sheet:
    spreads = {name: spread(values) for name, values in found.items()}
    rows = []
    for name, values in spreads.items():
        aim = {
            "spinning: first post": RUST_AIM_US,
            "spinning: Python callback": PYTHON_AIM_US,
            "outside: Python callback": PYTHON_AIM_US,
        }.get(name)
        cells = tuple(f"{values[column]:.2f}" for column in _COLUMNS)
        said = "" if aim is None else f"p50 <= {aim:g}: {verdict(values['p50'] <= aim)}"
        rows.append((name, *cells, str(len(found[name])), said))
    for who, values_of in PAPER.items():
        line = f"paper (GPU store): {'Rust' if who == 'post' else 'Python'} callback"
        p50, p90, p99, p999 = (f"{value:.2f}" for value in values_of)
        rows.append((line, "", "", p50, p90, p99, p999, "", "", ""))
    return Sheet(
        title="from a store to the watched word, us",
        columns=("", *_COLUMNS, "samples", "aim"),
        rows=tuple(rows),
        notes=tuple(f"{name}: {what}" for name, what in _WAYS.items()),
        figures={"us": spreads},
    )


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
        """Microseconds of each sample. The storing thread lets go of the interpreter right after
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
            taken.append((self._at - stored) / 1e3)
        return taken

    def _note(self, old: int, new: int) -> None:
        self._noted.append((new, time.monotonic_ns()))

    def measure_outside(self, samples: int) -> list[float]:
        """Microseconds of each sample; values that went by unseen were noticed with the next."""
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
            taken.append((at - before) / 1e3)
        return taken

    def _rest(self, way: str) -> None:
        # Asleep: there may be no core for one more thread that looks.
        time.sleep(_GAP_S if way == "spinning" else _REST_S)
