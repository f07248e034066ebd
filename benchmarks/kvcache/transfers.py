"""Page pushes beside the floor and peers, by the harness that measures all in turns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.contenders import nixl
from benchmarks.contenders.fabric import FabricRust
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.mooncake import Mooncake
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender
from benchmarks.harness.processes import adopt_orphans
from benchmarks.harness.results import Row
from benchmarks.harness.schedule import Plan, Say, run_cases
from benchmarks.kvcache.ends import KvPages
from benchmarks.kvcache.shape import page_cases, r1_cases
from benchmarks.sheets import Sheet, keeping, verdict

FLOOR_AIM = 0.9
PEER_AIM = 1.0


def pages(turns: int, say: Say, *, quick: bool = False) -> Sheet:
    """32 and 64 KiB pages beside the copy floor and the engine without the KV path."""
    notes = [f"aim over shm: {FLOOR_AIM} of the floor"]
    others: list[Contender] = [FabricRust("fabric-rust")]
    return _measure("page pushes, GB/s", page_cases(quick), others, turns, say, notes)


def r1(turns: int, say: Say, *, quick: bool = False, peers: bool = True) -> Sheet:
    """A prompt of 4096 tokens of DeepSeek-R1, 61 layers x 32 pages x 144 KiB, beside peers."""
    others: list[Contender] = [FabricRust("fabric-rust")]
    if peers:
        others += [*nixl.variants(), Mooncake()]
    title, notes = (
        "KV cache of 4096 tokens of DeepSeek-R1, GB/s",
        ["aim: ahead of NIXL and of Mooncake"],
    )
    return _measure(title, r1_cases(quick), others, turns, say, notes, peers=True)


def _measure(
    title: str,
    cases: Sequence[Case],
    others: Sequence[Contender],
    turns: int,
    say: Say,
    notes: list[str],
    *,
    peers: bool = False,
) -> Sheet:
    here: list[Contender] = []
    for contender in [KvPages(), *others, Floor(1)]:
        reason = contender.available()
        if reason is None:
            here.append(contender)
        else:
            notes.append(f"not here: {contender.name}, {reason}; get it with {contender.obtain}")
    adopt_orphans()
    rows: list[Row] = []
    with keeping(lambda: _sheet(title, rows, notes, peers=peers)):
        _, left = run_cases(cases, here, Plan(turns=turns, turn_seconds=0.1), say, rows.append)
    notes += [f"left behind and removed: {one}" for one in left]
    return _sheet(title, rows, notes, peers=peers)


def _sheet(title: str, rows: Sequence[Row], notes: list[str], *, peers: bool) -> Sheet:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        ours = row.figure(KvPages.name)
        for figure in row.figures:
            aim = ""
            if figure.contender == KvPages.name and not peers and row.case.link == "shm":
                aim = verdict((figure.of_floor or 0.0) >= FLOOR_AIM)
            elif figure.family == "peer" and ours is not None:
                aim = verdict((figure.ours_over or 0.0) > PEER_AIM)
            lines.append(
                (
                    row.key,
                    figure.contender,
                    f"{figure.median:.2f}",
                    f"{figure.low:.2f} to {figure.high:.2f}",
                    _ratio(figure.of_floor),
                    _ratio(figure.ours_over),
                    "compared" if figure.verified else "",
                    aim,
                )
            )
    failed = [f"failed: {r.key}, {f.contender}: {f.reason}" for r in rows for f in r.failures]
    return Sheet(
        title=title,
        columns=(
            "case",
            "contender",
            "median",
            "quartiles",
            "of floor",
            "ours / it",
            "bytes",
            "aim",
        ),
        rows=tuple(lines),
        notes=(*notes, *failed),
        figures={"rows": [msgspec.to_builtins(row) for row in rows]},
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
