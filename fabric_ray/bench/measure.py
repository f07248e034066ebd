"""Floors and transports take turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from fabric_ray.bench.figures import PING_NBYTES, Figure, Report, Unit, figure
from fabric_ray.bench.ways import Copy, Engine, Socket, Way
from fabric_ray.errors import InvalidArgument

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of a write, by default."""
TURNS = 7
"""By default; figures are medians of them."""

_POOL = 64 << 20
_TURN_NBYTES = 32 << 20
_MOST_WRITES = 1024
_PINGS = 200
_FLOORS = {"shm": "copy", "tcp": "socket"}


def measure(
    *,
    transports: Sequence[str] = ("shm", "tcp"),
    sizes: Sequence[int] = SIZES,
    turns: int = TURNS,
    tell: Callable[[str], object] = lambda _: None,
) -> Report:
    """Measures each transport between this process and another one on this host.

    Args:
        transports: as an engine names them; those with NICs too.
        sizes: bytes of a write, at most 64 MiB.
        turns: how often each is measured.
        tell: called with what is being measured.

    Raises:
        InvalidArgument: a size, a number or a name that means nothing.
        FabricError: a transport that doesn't work here, or bytes that arrived wrong.
    """
    for size in sizes:
        if not 1 <= size <= _POOL:
            raise InvalidArgument(f"a write of {size} bytes can't be measured; give 1 to {_POOL}")
    if turns < 1 or not transports:
        raise InvalidArgument("nothing is to be measured; give transports, and 1 turn or more")
    began = time.perf_counter()
    floors = dict.fromkeys(_FLOORS[t] for t in transports if t in _FLOORS)
    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        for name in (*floors, *dict.fromkeys(transports)):
            tell(f"starting {name}")
            ways[name] = way = _open(name)
            stack.callback(way.close)
        figures = [
            *(f for size in sizes for f in _streams(ways, size, turns, tell)),
            *_pings(ways, turns, tell),
        ]
    return Report(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        turns=turns,
        seconds=time.perf_counter() - began,
        figures=tuple(figures),
    )


def _open(name: str) -> Way:
    if name == "copy":
        return Copy(_POOL)
    if name == "socket":
        return Socket(_POOL)
    return Engine(name, _POOL)


def _streams(
    ways: dict[str, Way], nbytes: int, turns: int, tell: Callable[[str], object]
) -> Iterator[Figure]:
    count = max(1, min(_MOST_WRITES, _TURN_NBYTES // nbytes))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way.restart()
        # The first ones pay for what is set up once.
        way.stream(nbytes, count)
    for turn in range(turns):
        for name, way in ways.items():
            tell(f"{name}, {nbytes} bytes, turn {turn + 1} of {turns}")
            taken[name].append(nbytes * count / way.stream(nbytes, count) / 1e9)
    for way in ways.values():
        way.verify(min((turns + 1) * count, _POOL // nbytes) * nbytes)
    yield from _figures(taken, nbytes, "GB/s")


def _pings(ways: dict[str, Way], turns: int, tell: Callable[[str], object]) -> Iterator[Figure]:
    taken: dict[str, list[float]] = {}
    for turn in range(turns):
        for name, way in ways.items():
            tell(f"{name}, {PING_NBYTES} bytes and back, turn {turn + 1} of {turns}")
            seconds = way.ping(_PINGS)
            if seconds is not None:
                taken.setdefault(name, []).append(seconds * 1e6)
    yield from _figures(taken, PING_NBYTES, "us")


def _figures(taken: dict[str, list[float]], nbytes: int, unit: Unit) -> Iterator[Figure]:
    for name, values in taken.items():
        floor = _FLOORS.get(name)
        plain = (floor, taken[floor]) if floor in taken else None
        yield figure(name, nbytes, unit, values, plain)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
