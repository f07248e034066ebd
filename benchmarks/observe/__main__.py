"""What the flight recorder costs: `python -m benchmarks.observe`.

Pairs of processes, one with the recorder and one without, are asked in turns, in an order that
changes, for many short samples. Where a process's memory comes to lie makes it some percent faster
or slower for as long as it lives, with the recorder or without: so there are many pairs, each with
new processes, and the median of what they find counts. What other work on the machine takes can
only make a sample longer: the fast tenth is compared, and the medians are shown beside it.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.contenders import perf
from benchmarks.harness.processes import adopt_orphans
from benchmarks.sheets import Json, Markdown, Output, Sheet, keeping, verdict

AIM = 0.01
_KIB, _MIB = 1 << 10, 1 << 20


class Load(NamedTuple):
    """One kind of work."""

    title: str
    request: dict[str, Any]


def loads() -> list[Load]:
    """From the smallest write to the largest."""
    return [
        Load("8 B there and back", _request("echo", 8, 50)),
        Load("8 B, all in flight, one a submit", _request("rate", 8, 500)),
        Load("8 B, 64 a submit", _request("batch", 8, 2000, pages=64)),
        Load("64 KiB, one after the other", _request("write", 64 * _KIB, 20)),
        Load("64 pages of 16 KiB", _request("pages", 16 * _KIB, 4, pages=64)),
        Load("8 MiB", _request("write", 8 * _MIB, 1)),
    ]


def _request(kind: str, nbytes: int, operations: int, pages: int = 1) -> dict[str, Any]:
    return {"kind": kind, "bytes": nbytes, "operations": operations, "pages": pages, "samples": 20}


class Ratios(NamedTuple):
    """What one pair of processes found for one kind of work."""

    seconds: float
    """That a tenth of the samples without the recorder keep."""
    fast: float
    """The same with it, as a multiple."""
    usual: float
    """The medians' ratio."""


class Pair:
    """The same engines with and without the recorder, in processes of their own."""

    def __init__(self, transport: str, on_first: bool) -> None:
        common = ["engine", "serve", "--transport", transport, "--region", str(64 * _MIB)]
        arguments = {True: common, False: [*common, "--no-records"]}
        self._services = {on: perf.Service(arguments[on]) for on in (on_first, not on_first)}

    def ask(self, load: Load, on_first: bool) -> tuple[list[float], list[float]]:
        """Seconds of an operation, one for each sample, with the recorder and without."""
        took = {
            on: self._services[on].ask(load.request)["seconds"] for on in (on_first, not on_first)
        }
        return took[True], took[False]

    def stop(self) -> None:
        for service in self._services.values():
            service.stop()


def compare(transport: str, turns: int, on_first: bool) -> dict[str, Ratios]:
    """One pair of processes, by kind of work."""
    pair = Pair(transport, on_first)
    on: dict[str, list[float]] = {}
    off: dict[str, list[float]] = {}
    try:
        for turn in range(turns):
            for load in loads():
                with_it, without = pair.ask(load, turn % 2 == 0)
                on.setdefault(load.title, []).extend(with_it)
                off.setdefault(load.title, []).extend(without)
    finally:
        pair.stop()
    return {title: ratios(with_it, off[title]) for title, with_it in on.items()}


def ratios(with_it: list[float], without: list[float]) -> Ratios:
    """Of samples of one pair of processes."""
    fast_with, fast = (statistics.quantiles(times, n=10)[0] for times in (with_it, without))
    usual = statistics.median(with_it) / statistics.median(without)
    return Ratios(seconds=fast, fast=fast_with / fast, usual=usual)


def cost(transport: str, pairs: int, turns: int) -> Sheet:
    """A row for each kind of work."""
    found: list[dict[str, Ratios]] = []
    with keeping(lambda: _sheet(transport, found, turns)):
        for number in range(pairs):
            found.append(compare(transport, turns, number % 2 == 0))
    return _sheet(transport, found, turns)


def _sheet(transport: str, found: list[dict[str, Ratios]], turns: int) -> Sheet:
    sheet = Sheet(
        title=f"The flight recorder over {transport}",
        columns=("work", "without", "with it", "half of all", "medians", f"aim {AIM:.0%}"),
        notes=(
            f"{len(found)} pairs of processes, {turns} turns of 20 samples each; with it: the time "
            "that a tenth of the samples keep, as a multiple of that without, median over the "
            "pairs",
        ),
        figures={"ratios": [{k: r._asdict() for k, r in one.items()} for one in found]},
    )
    for load in loads():
        seconds, fast, usual = zip(*(one[load.title] for one in found), strict=True)
        low, middle, high = statistics.quantiles(fast, n=4)
        best = f"{statistics.median(seconds) * 1e6:.3f} us"
        spread, typical = f"{low:.3f}-{high:.3f}", f"{statistics.median(usual):.3f}"
        met = verdict(middle <= 1 + AIM)
        sheet.rows.append((load.title, best, f"{middle:.3f}", spread, typical, met))
    return sheet


def main(
    transport: Annotated[list[str] | None, typer.Option(help="shm or tcp; both by default")] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of processes, each new")] = 24,
    turns: Annotated[int, typer.Option(min=1, help="Turns of 20 samples of each work")] = 12,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """What the flight recorder costs, as ratios."""
    adopt_orphans()
    output = Output("observe", json, markdown=markdown)
    for name in transport or ["shm", "tcp"]:
        output.say(f"measuring over {name}")
        output.add(partial(cost, name, pairs, turns))
    output.end()


if __name__ == "__main__":
    typer.run(main)
