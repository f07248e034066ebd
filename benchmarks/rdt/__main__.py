"""Measure tensors by object reference: fabric-ray beside NIXL, gloo and Ray's object store."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
import typer

from benchmarks.harness.cases import GIB, KIB, MIB
from fabric_ray.bench.record import Results, Resume, Turns, recorded
from fabric_ray.bench.results import Family, RowHeader, row_of_turns
from fabric_ray.bench.table import size
from fabric_ray.bench.turns import rotated

# Ray reads them when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from benchmarks.rdt.pair import FABRIC, GLOO, MAPPED, NIXL, NUMPY, STORE, Pair

SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
KINDS = ("argument", "target")
FLOOR = "floor"
FAMILIES: Mapping[str, Family] = {FABRIC: "ours", MAPPED: "ours", FLOOR: "floor"}


def timed(call: Callable[[], float], count: int) -> float:
    """The median of so many samples, after two that warm up."""
    return statistics.median([call() for _ in range(count + 2)][2:])


def floor(nbytes: int) -> float:
    """Seconds that a plain copy takes, into memory that is there."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def copy() -> float:
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    return timed(copy, 4)


def measure(contenders: Sequence[str], sizes: Sequence[int], turns: int, results: Results) -> None:
    """One pair of actors at a time, since some libraries poll while they are idle. A turn is kept
    when all have had it."""
    keys = {(kind, nbytes): f"rdt/{kind}/{size(nbytes)}" for kind in KINDS for nbytes in sizes}
    if results.has(*keys.values()):
        return
    found = {at: defaultdict(list, results.turns(key)) for at, key in keys.items()}
    for turn in range(min(len(taken[FLOOR]) for taken in found.values()), turns):
        for name in rotated(contenders, turn):
            results.say(f"turn {turn + 1} of {turns}: {name}")
            with Pair(name) as pair:
                for nbytes in sizes:
                    pair.fill(nbytes)
                    count = max(3, min(30, 512 * MIB // nbytes))
                    found["argument", nbytes][name].append(timed(pair.argument, count))
                    if name != GLOO:  # it has no get
                        pair.check()
                        found["target", nbytes][name].append(timed(pair.target, count))
        for nbytes in sizes:
            took = floor(nbytes)
            for kind in KINDS:
                found[kind, nbytes][FLOOR].append(took)
        for (kind, nbytes), taken in found.items():
            facts = {"amount": nbytes, "group": kind, "size": nbytes}
            header = RowHeader(key=keys[kind, nbytes], unit="ms", **facts)
            shown = {n: (FAMILIES.get(n, "peer"), taken[n]) for n in (*contenders, FLOOR)}
            results.add(row_of_turns(header, shown, complete=turn + 1 == turns))


def main(
    sizes: Annotated[str, typer.Option(help="Bytes, commas between")] = ",".join(map(str, SIZES)),
    turns: Turns = 3,
    only: Annotated[str, typer.Option(help="Contenders, commas between")] = "",
    address: Annotated[str, typer.Option(help="A Ray that runs already; else one is started")] = "",
    resume: Resume = None,
) -> None:
    """Two actors on this machine, each contender in its turn. A method returns a tensor that its
    actor keeps, and the reader takes it as an argument; or the source puts it, and the reader gets
    it into memory that both have registered before (target)."""
    contenders = [FABRIC, MAPPED, NIXL, GLOO, NUMPY, STORE]
    each = [int(one) for one in sizes.split(",")]
    room = 4 * max(each) + GIB
    own = {} if address else {"object_store_memory": room, "include_dashboard": False}
    with recorded("rdt", resume) as results:
        if importlib.util.find_spec("nixl") is None:
            contenders.remove(NIXL)
            results.say("nixl is not installed: pip install -e '.[bench]'")
        contenders = [n for n in contenders if not only or n in (FABRIC, *only.split(","))]
        ray.init(address or "local", log_to_driver=False, logging_level="error", **own)
        try:
            measure(contenders, each, turns, results)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
