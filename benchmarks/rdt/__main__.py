"""Measure tensors by object reference: fabric-ray beside NIXL, gloo and Ray's object store."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer

from benchmarks import sheets

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
FLOOR = "floor"
Times = dict[tuple[str, int], list[float]]


def name(nbytes: int) -> str:
    for unit, text in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {text}"
    return f"{nbytes} B"


def effort(nbytes: int) -> int:
    """Samples of one turn."""
    return max(3, min(30, (512 * MIB) // nbytes))


def floor(nbytes: int) -> float:
    """Seconds that a plain copy takes, into memory that is there."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    spent = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent[1:])


def measure(
    ways: Sequence[str],
    sizes: Sequence[int],
    turns: int,
    say: Callable[[str], None],
    argument: Times,
    target: Times,
) -> None:
    """Adds medians of each turn, as an argument and into memory that is registered."""
    from benchmarks.rdt.pair import GLOO, Pair

    for turn in range(turns):
        for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
            say(f"turn {turn + 1} of {turns}: {way}")
            with Pair(way) as pair:
                for nbytes in sizes:
                    pair.fill(nbytes)
                    count = effort(nbytes)
                    samples = [pair.argument() for _ in range(count + 2)]
                    argument[way, nbytes].append(statistics.median(samples[2:]))
                    if way == GLOO:  # it has no get
                        continue
                    pair.check()
                    samples = [pair.target() for _ in range(count + 2)]
                    target[way, nbytes].append(statistics.median(samples[2:]))
        for nbytes in sizes:
            took = floor(nbytes)
            argument[FLOOR, nbytes].append(took)
            target[FLOOR, nbytes].append(took)


def sheet(title: str, ways: Sequence[str], sizes: Sequence[int], times: Times) -> sheets.Sheet:
    """Milliseconds, and how many times as long as ours the others take."""
    from benchmarks.rdt.pair import FABRIC

    shown = [way for way in (*ways, FLOOR) if (way, sizes[0]) in times]
    others = [way for way in shown if way != FABRIC]
    rows = []
    for nbytes in sizes:
        if not all(times[way, nbytes] for way in shown):  # the run ended before
            continue
        cells = [name(nbytes)]
        cells += [f"{1e3 * statistics.median(times[way, nbytes]):.2f}" for way in shown]
        for way in others:
            pairs = zip(times[way, nbytes], times[FABRIC, nbytes], strict=False)
            cells.append(f"{statistics.median(theirs / ours for theirs, ours in pairs):.2f}")
        rows.append(tuple(cells))
    return sheets.Sheet(
        title=title,
        columns=("bytes", *(f"{way} ms" for way in shown), *(f"{way}/fabric" for way in others)),
        rows=tuple(rows),
        figures={f"{way} {nbytes} s": figures for (way, nbytes), figures in times.items()},
    )


def main(
    sizes: Annotated[str, typer.Option(help="Bytes, commas between")] = ",".join(map(str, SIZES)),
    turns: Annotated[int, typer.Option(min=1, help="Turns of each way")] = 3,
    only: Annotated[str, typer.Option(help="Ways, commas between")] = "",
    address: Annotated[str, typer.Option(help="A Ray that runs already; else one is started")] = "",
    json: sheets.Json = None,
    markdown: sheets.Markdown = False,
) -> None:
    """Two actors on this machine, each way in its turn, one pair at a time, since some libraries
    poll while they are idle. A method returns a tensor that its actor keeps, and the reader takes
    it as an argument; or the source puts it, and the reader gets it into memory that both have
    registered before."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from benchmarks.rdt.pair import FABRIC, GLOO, MAPPED, NIXL, NUMPY, STORE

    ways = [FABRIC, MAPPED, NIXL, GLOO, NUMPY, STORE]
    out = sheets.Output("rdt", json, markdown=markdown)
    if importlib.util.find_spec("nixl") is None:
        ways.remove(NIXL)
        out.say("nixl is not installed: pip install -e '.[bench]'")
    ways = [way for way in ways if not only or way in (FABRIC, *only.split(","))]
    each = [int(size) for size in sizes.split(",")]
    room = 4 * max(each) + GIB
    own = {} if address else {"object_store_memory": room, "include_dashboard": False}
    ray.init(address or "local", log_to_driver=False, logging_level="error", **own)
    argument: Times = defaultdict(list)
    target: Times = defaultdict(list)

    def first() -> sheets.Sheet:
        return sheet("as an argument", ways, each, argument)

    def measured() -> sheets.Sheet:
        with sheets.keeping(first):
            measure(ways, each, turns, out.say, argument, target)
        return first()

    try:
        out.add(measured)
    finally:
        ray.shutdown()
    out.add(lambda: sheet("into registered memory", ways, each, target))
    out.end()


if __name__ == "__main__":
    typer.run(main)
