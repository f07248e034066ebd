"""What the flight recorder costs: `python -m benchmarks.observe`.

Two pairs of processes run side by side all the time, one pair with the recorder and one without;
they are asked in turns, in an order that changes. Each turn gives a ratio, and the median of those
is the cost: what the machine does meanwhile is done to both.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.contenders import perf
from benchmarks.harness.processes import adopt_orphans
from benchmarks.sheets import Output, Sheet, verdict

AIM = 0.01
_KIB, _MIB = 1 << 10, 1 << 20


class Load(NamedTuple):
    """One kind of work."""

    title: str
    transport: str
    request: dict[str, Any]


def loads(transport: str) -> list[Load]:
    """From the smallest write to the largest."""
    return [
        Load("8 B there and back", transport, _request("echo", 8, 2000)),
        Load("8 B, all in flight, one a submit", transport, _request("rate", 8, 20_000)),
        Load("8 B, 64 a submit", transport, _request("batch", 8, 20_000, pages=64)),
        Load("64 KiB, one after the other", transport, _request("write", 64 * _KIB, 500)),
        Load("64 pages of 16 KiB", transport, _request("pages", 16 * _KIB, 50, pages=64)),
        Load("8 MiB", transport, _request("write", 8 * _MIB, 10)),
    ]


def _request(kind: str, nbytes: int, operations: int, pages: int = 1) -> dict[str, Any]:
    return {"kind": kind, "bytes": nbytes, "operations": operations, "pages": pages, "samples": 3}


class Pair:
    """The same engines with and without the recorder."""

    def __init__(self, transport: str) -> None:
        common = ["engine", "serve", "--transport", transport, "--region", str(64 * _MIB)]
        self._on = perf.Service(common)
        self._off = perf.Service([*common, "--no-records"])

    def ratio(self, load: Load, first: bool) -> tuple[float, float]:
        """How much longer an operation takes with the recorder, and its seconds without."""
        order = (self._on, self._off) if first else (self._off, self._on)
        took = {service: min(service.ask(load.request)["seconds"]) for service in order}
        return took[self._on] / took[self._off], took[self._off]

    def stop(self) -> None:
        self._on.stop()
        self._off.stop()


def cost(transport: str, turns: int) -> Sheet:
    """A row for each kind of work."""
    pair = Pair(transport)
    rows, figures = [], {}
    try:
        for load in loads(transport):
            measured = [pair.ratio(load, turn % 2 == 0) for turn in range(turns + 1)][1:]
            ratios = sorted(ratio for ratio, _ in measured)
            median, base = statistics.median(ratios), statistics.median(s for _, s in measured)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            rows.append(
                (
                    load.title,
                    f"{base * 1e6:.3f} us",
                    f"{median:.4f}",
                    f"{low:.4f} to {high:.4f}",
                    verdict(median <= 1 + AIM),
                )
            )
            figures[load.title] = ratios
    finally:
        pair.stop()
    return Sheet(
        title=f"The flight recorder over {transport}",
        columns=("work", "an operation without it", "with it", "middle half", f"aim {AIM:.0%}"),
        rows=tuple(rows),
        notes=(f"medians of {turns} turns; with it: as a multiple of without it",),
        figures={"ratios": figures},
    )


def main(
    transport: Annotated[list[str] | None, typer.Option(help="shm or tcp; both by default")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Pairs of measurements of each work")] = 31,
    markdown: Annotated[bool, typer.Option(help="Print Markdown")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures here")] = None,
) -> None:
    """What the flight recorder costs, as ratios."""
    adopt_orphans()
    output = Output(json, markdown=markdown)
    for name in transport or ["shm", "tcp"]:
        output.say(f"measuring over {name}")
        output.add(partial(cost, name, turns))
    output.end()


if __name__ == "__main__":
    typer.run(main)
