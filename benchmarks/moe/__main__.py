"""Measure expert parallelism beside torch's all_to_all and the copy floor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.moe.machine import COSTS, PUBLISHED
from benchmarks.moe.model import table
from benchmarks.moe.ranks import NICS, measure
from benchmarks.moe.ranks import simulate as run
from benchmarks.moe.shape import Shape, batch, crossings
from fabric_ray.bench.record import Quick, Results, Resume, Turns, recorded
from fabric_ray.bench.results import Family, RowHeader, row_of_turns

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

CONTENDERS = ["shm", "tcp", "gloo", "floor"]
OF_NODES = ["nodes shm", "shm", "gloo", "floor"]
FAMILIES: Mapping[str, Family] = {"gloo": "peer", "floor": "floor"}
HALVES = ("dispatch", "combine")

Ranks = Annotated[str, typer.Option(help="Ranks, commas between")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each rank")]


@app.command()
def exchange(
    ranks: Ranks = "2,4,8",
    tokens: Annotated[str, typer.Option(help="Tokens of each rank, commas between")] = "",
    turns: Turns = 11,
    quick: Quick = False,
    resume: Resume = None,
) -> None:
    """Dispatch and combine of DeepSeek-V3's shapes: fp8 with scales out, bfloat16 back."""
    lengths = tokens or ("1,8" if quick else "1,16,128,4096")
    with recorded("moe-exchange", resume) as results:
        for shape in (_shape(r, t, quick) for r in ranks.split(",") for t in lengths.split(",")):
            names = _that_fit(shape)
            few = turns if shape.tokens < 1024 else max(3, turns // 4)
            if names:
                _exchange(results, "moe", shape, names, few)
            else:
                results.say(f"{shape.ranks} x {shape.tokens}: left out, too large for this memory")


@app.command()
def throughput(
    ranks: Ranks = "4,8",
    tokens: Tokens = 4096,
    turns: Turns = 5,
    quick: Quick = False,
    resume: Resume = None,
) -> None:
    """The high-throughput mode over two nodes (uccl-ep), beside the other one and gloo. Both nodes
    are this machine: bytes between them cost what those within do."""
    with recorded("moe-throughput", resume) as results:
        for r in ranks.split(","):
            shape = _shape(r, min(tokens, 64) if quick else tokens, quick)
            crossed = [crossings(shape, batch(shape, r, 0), r) for r in range(shape.ranks)]
            _exchange(results, "moe-nodes", shape, OF_NODES, turns, crossed)


@app.command()
def private(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks")] = 4,
    tokens: Tokens = 128,
    turns: Turns = 31,
    transport: Annotated[str, typer.Option(help="shm, tcp, or a simulated NIC")] = "shm",
    quick: Quick = False,
    resume: Resume = None,
) -> None:
    """Dispatch with smaller and smaller private buffers (fabric-lib, Figure 11); the floor is that
    with room for all rows."""
    full = tokens * 8
    nic = next((n for n in NICS if n.name == transport), None)
    floor: list[float] = []
    with recorded("moe-private", resume) as results:
        for size in (full, *(n for n in (256, 128, 64, 32, 16, 8, 4, 0) if n < full)):
            header = RowHeader(key=f"moe-private/{transport}/{size} rows", unit="ms")
            shape = msgspec.structs.replace(_shape(ranks, tokens, quick), private_rows=size)
            found = results.turns(header.key).get("ours", [])
            if not found:
                results.say(header.key)
                if nic is not None:
                    found = [run(shape, nic, exchanges=turns).dispatch_p50_us / 1e6]
                else:
                    found = [t[0] for t in measure(shape, [transport], turns)[transport]]
            floor = floor or found
            taken = {"ours": ("ours", found), "room for all": ("floor", floor)}
            results.add(row_of_turns(header, taken))


@app.command()
def simulate(ranks: Ranks = "8,16,32,64", tokens: Tokens = 128, resume: Resume = None) -> None:
    """DeepSeek-V3's decode on simulated NICs (fabric-lib, Figure 9 and Table 9). Floor: bytes over
    the busiest port and one way, no NVLink. Post: real time from the call to the last of two
    writes to each peer handed to its link, with 128 tiny tokens packed; the paper's: one scatter's
    writes."""
    with recorded("moe-simulate", resume) as results:
        for nic in NICS:
            for r in ranks.split(","):
                shape = _shape(r, tokens)
                key = f"moe-simulate/{nic.name}/{shape.ranks}"
                if results.has(f"{key}/post"):
                    continue
                results.say(key)
                one = run(shape, nic)
                for half in HALVES:
                    p50, floor = (getattr(one, f"{half}_{n}_us") / 1e6 for n in ("p50", "floor"))
                    figures = {"simulated": ("ours", [p50]), "floor": ("floor", [floor])}
                    results.add(row_of_turns(RowHeader(key=f"{key}/{half}", unit="us"), figures))
                # So little to pack that posting is what takes time.
                tiny = msgspec.structs.replace(shape, hidden=128, topk=1)
                posts = {"simulated": ("ours", [run(tiny, nic).post_p50_us / 1e6])}
                if shape.ranks in nic.paper_post_us:
                    posts["paper"] = ("peer", [nic.paper_post_us[shape.ranks] / 1e6])
                results.add(row_of_turns(RowHeader(key=f"{key}/post", unit="us"), posts))


@app.command()
def model() -> None:
    """What a GPU is predicted to take, by arithmetic (`benchmarks/moe/model.py`), from the best to
    the worst of each assumption; the assumptions follow."""
    for line in table():
        typer.echo(line)
    for name, cost in COSTS.items():
        typer.echo(f"{name}: {cost.best:g} to {cost.worst:g}; {cost.source}")
    for row in PUBLISHED:
        typer.echo(f"{row.who}, {row.case}: {row.where}")


def _shape(ranks: int | str, tokens: int | str, quick: bool = False) -> Shape:
    small = {"hidden": 512, "experts": 16} if quick else {}
    return Shape(ranks=int(ranks), tokens=int(tokens), **small)


def _exchange(
    results: Results,
    suite: str,
    shape: Shape,
    names: list[str],
    turns: int,
    crossed: Sequence[tuple[int, int]] = (),
) -> None:
    """Both halves; times are the slowest rank's. `crossed` are rows of each rank that go to the
    other node, once for each token and once for each expert."""
    key = f"{suite}/{shape.ranks}x{shape.tokens}"
    if results.has(f"{key}/combine"):
        return
    results.say(key)
    times = measure(shape, names, turns)
    for half, nbytes in enumerate((shape.row_nbytes, shape.back_nbytes)):
        taken = {n: (FAMILIES.get(n, "ours"), [t[half] for t in times[n]]) for n in names}
        details = {}
        if crossed:
            once, each = (sum(rows) * nbytes / 2**20 for rows in zip(*crossed, strict=True))
            details = {names[0]: {"MiB between nodes": once, "without dedup": each}}
        results.add(row_of_turns(RowHeader(key=f"{key}/{HALVES[half]}", unit="ms"), taken, details))


def _that_fit(shape: Shape) -> list[str]:
    """The contenders that the machine's memory has room for: without tcp, if not for all."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = 1024 * int(found[1]) if found else 0
    if shape.nbytes(2) < free:
        return CONTENDERS
    return [n for n in CONTENDERS if n != "tcp"] if shape.nbytes(1) < free else []


if __name__ == "__main__":
    app()
