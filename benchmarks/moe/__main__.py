"""Measure expert parallelism beside torch's all_to_all and the copy floor."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.moe.nodes import NODES, crossings
from benchmarks.moe.ranks import Times, measure
from benchmarks.moe.shape import Shape, batch
from benchmarks.moe.simulated import NICS
from benchmarks.moe.simulated import simulate as run
from benchmarks.sheets import Json, Markdown, Output, Quick, Sheet, Turns, keeping

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

CONTENDERS = ["shm", "tcp", "gloo", "floor"]
OF_NODES = ["nodes shm", "shm", "gloo", "floor"]


@app.callback()
def main() -> None:
    """Measure expert parallelism."""


@app.command()
def exchange(
    ranks: Annotated[str, typer.Option(help="Ranks, commas between")] = "2,4,8",
    tokens: Annotated[str, typer.Option(help="Tokens of each rank, commas between")] = "",
    turns: Turns = 11,
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Dispatch and combine of DeepSeek-V3's shapes: fp8 with scales out, bfloat16 back."""
    out = Output("moe-exchange", json, markdown=markdown)
    lengths = tokens or ("1,8" if quick else "1,16,128,4096")
    cases = [
        Shape(ranks=int(r), tokens=int(t), **({"hidden": 512, "experts": 16} if quick else {}))
        for r in ranks.split(",")
        for t in lengths.split(",")
    ]
    out.add(lambda: _exchanges(cases, turns, out.say))
    out.end()


@app.command()
def throughput(
    ranks: Annotated[str, typer.Option(help="Ranks of two nodes, commas between")] = "4,8",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank")] = 4096,
    turns: Turns = 5,
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """The high-throughput mode over two nodes (uccl-ep), beside the other one and gloo."""
    out = Output("moe-throughput", json, markdown=markdown)
    small = {"hidden": 512, "experts": 16, "tokens": min(tokens, 64)} if quick else {}
    cases = [Shape(**{"ranks": int(r), "tokens": tokens, **small}) for r in ranks.split(",")]
    out.add(lambda: _throughput(cases, turns, out.say))
    out.end()


@app.command()
def private(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank")] = 128,
    turns: Turns = 31,
    transport: Annotated[str, typer.Option(help="shm, tcp, or a simulated NIC")] = "shm",
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Dispatch with smaller and smaller private buffers (fabric-lib, Figure 11)."""
    out = Output("moe-private", json, markdown=markdown)
    small = {"hidden": 512, "experts": 16} if quick else {}
    full = tokens * 8
    sizes = [full, *(n for n in (256, 128, 64, 32, 16, 8, 4, 0) if n < full)]
    cases = [Shape(ranks=ranks, tokens=tokens, private_rows=n, **small) for n in sizes]
    out.add(lambda: _private(cases, transport, turns, out.say))
    out.end()


@app.command()
def simulate(
    ranks: Annotated[str, typer.Option(help="Ranks, commas between")] = "8,16,32,64",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank")] = 128,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """DeepSeek-V3's decode on simulated NICs (fabric-lib, Figure 9 and Table 9)."""
    out = Output("moe-simulate", json, markdown=markdown)
    cases = [Shape(ranks=int(r), tokens=tokens) for r in ranks.split(",")]
    out.add(lambda: _simulated(cases, out.say))
    out.end()


def _ms(values: list[float]) -> float:
    return 1e3 * statistics.median(values)


def _exchanges(cases: list[Shape], turns: int, say: Callable[[str], None]) -> Sheet:
    pairs = [("shm", "gloo"), ("tcp", "gloo"), ("shm", "floor")]
    ratios = (f"{ours}/{other}" for ours, other in pairs)
    sheet = Sheet(
        title="Dispatch and combine, DeepSeek-V3",
        columns=("ranks x tokens", "", *(f"{n} ms" for n in CONTENDERS), *ratios),
        notes=(
            "medians of the slowest rank's times; below 1, ours is ahead of gloo; floor: the same "
            "bytes copied once",
        ),
    )
    with keeping(lambda: sheet):
        for case in cases:
            name = f"{case.ranks} ranks of {case.tokens} tokens"
            names = _that_fit(case)
            if not names:
                say(f"{name}: left out, too large for this memory")
                continue
            say(name)
            times = measure(case, names, turns if case.tokens < 1024 else max(3, turns // 4))
            sheet.figures[f"ep{case.ranks} tokens {case.tokens}"] = times
            for half, what in enumerate(("dispatch", "combine")):
                ms = _medians(times, half)
                cells = [f"{ms[n]:.2f}" if n in ms else "" for n in CONTENDERS]
                cells += [f"{ms[a] / ms[b]:.2f}" if a in ms else "" for a, b in pairs]
                sheet.rows.append((f"{case.ranks} x {case.tokens}", what, *cells))
    return sheet


def _throughput(cases: list[Shape], turns: int, say: Callable[[str], None]) -> Sheet:
    traffic = ("MiB between nodes", "without dedup")
    times_of = (f"{n} ms" for n in OF_NODES)
    sheet = Sheet(
        title="The high-throughput mode, DeepSeek-V3",
        columns=("ranks x tokens", "", *times_of, "nodes/gloo", "nodes/floor", *traffic),
        notes=(
            "medians of the slowest rank's times; the nodes are halves of this machine's ranks: "
            "bytes between them cost what those within do; floor: a row for each expert copied "
            "once",
        ),
    )
    with keeping(lambda: sheet):
        for case in cases:
            say(f"{case.ranks} ranks of {case.tokens} tokens on {NODES} nodes")
            times = measure(case, OF_NODES, turns)
            crossed = [crossings(case, batch(case, r, 0), r) for r in range(case.ranks)]
            rows = [sum(c[i] for c in crossed) for i in (0, 1)]
            sheet.figures[f"ep{case.ranks}"] = {**times, "rows between nodes": rows}
            for half, what in enumerate(("dispatch", "combine")):
                ms = _medians(times, half)
                size = (case.row_nbytes, case.back_nbytes)[half]
                cells = [f"{ms[n]:.1f}" for n in OF_NODES]
                cells += [f"{ms[OF_NODES[0]] / ms[n]:.2f}" for n in ("gloo", "floor")]
                cells += [f"{count * size / 2**20:.0f}" for count in rows]
                sheet.rows.append((f"{case.ranks} x {case.tokens}", what, *cells))
    return sheet


def _that_fit(case: Shape) -> list[str]:
    """The contenders that the machine's memory has room for: without tcp, if not for all."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = 1024 * int(found[1]) if found else 0
    if case.nbytes(2) < free:
        return CONTENDERS
    return [n for n in CONTENDERS if n != "tcp"] if case.nbytes(1) < free else []


def _medians(times: Times, half: int) -> dict[str, float]:
    return {name: _ms([t[half] for t in all_turns]) for name, all_turns in times.items()}


def _private(cases: list[Shape], transport: str, turns: int, say: Callable[[str], None]) -> Sheet:
    shape, best = cases[0], 0.0
    sheet = Sheet(
        title=f"Private buffers: {shape.tokens} tokens, {shape.ranks} ranks over {transport}",
        columns=("rows of each source", "ms", "of the speed with room for all"),
    )
    with keeping(lambda: sheet):
        for case in cases:
            say(f"{case.private_rows} private rows")
            nic = next((n for n in NICS if n.name == transport), None)
            if nic is not None:
                one = run(case, gbps=nic.gbps, latency_us=nic.latency_us, exchanges=turns)
                ms = one.dispatch_p50_us / 1e3
            else:
                ms = _ms([t[0] for t in measure(case, [transport], turns)[transport]])
            best = best or ms
            sheet.figures[f"{case.private_rows} rows, ms"] = ms
            sheet.rows.append((str(case.private_rows), f"{ms:.3f}", f"{best / ms:.2f}"))
    return sheet


def _simulated(cases: list[Shape], say: Callable[[str], None]) -> Sheet:
    given = ", ".join(
        f"{n.name}: {n.gbps:.0f} Gb/s and {n.latency_us:.0f} us one way" for n in NICS
    )
    halves = ("dispatch us", "of its floor", "combine us", "of its floor")
    sheet = Sheet(
        title=f"Simulated NICs, {cases[0].tokens} tokens of DeepSeek-V3",
        columns=("NIC, ranks", *halves, "post us", "paper's post us"),
        notes=(
            f"{given}; floor: bytes over the busiest port and one way, no NVLink",
            "post: real time from the call to the last of two writes to each peer handed to its "
            "link, with 128 tiny tokens packed; the paper's: one scatter's writes",
        ),
    )
    with keeping(lambda: sheet):
        for nic in NICS:
            for case in cases:
                say(f"{case.ranks} ranks on {nic.name}")
                one = run(case, gbps=nic.gbps, latency_us=nic.latency_us)
                sheet.figures[f"{nic.name} ep{case.ranks}"] = one
                # So little to pack that posting is what takes time.
                tiny = msgspec.structs.replace(case, hidden=128, topk=1)
                post = run(tiny, gbps=nic.gbps, latency_us=nic.latency_us).post_p50_us
                paper = nic.paper_post_us.get(case.ranks)
                cells = (
                    f"{one.dispatch_p50_us:.0f}",
                    f"{one.dispatch_p50_us / one.dispatch_floor_us:.2f}",
                    f"{one.combine_p50_us:.0f}",
                    f"{one.combine_p50_us / one.combine_floor_us:.2f}",
                    f"{post:.1f}",
                    "" if paper is None else f"{paper:.1f}",
                )
                sheet.rows.append((f"{nic.name}, {case.ranks}", *cells))
    return sheet


if __name__ == "__main__":
    app()
