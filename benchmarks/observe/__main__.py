"""What the flight recorder costs: `python -m benchmarks.observe`.

Two pairs of processes run side by side all the time, one pair with the recorder and one without;
they are asked in turns, in an order that changes, for many short samples. What other work on the
machine takes can only make a sample longer, so the fastest of each are compared.
"""

from __future__ import annotations

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


class Pair:
    """The same engines with and without the recorder."""

    def __init__(self, transport: str) -> None:
        common = ["engine", "serve", "--transport", transport, "--region", str(64 * _MIB)]
        self._on = perf.Service(common)
        self._off = perf.Service([*common, "--no-records"])

    def ask(self, load: Load, on_first: bool) -> tuple[list[float], list[float]]:
        """Seconds of an operation, one for each sample, with the recorder and without."""
        order = (self._on, self._off) if on_first else (self._off, self._on)
        took = {service: service.ask(load.request)["seconds"] for service in order}
        return took[self._on], took[self._off]

    def stop(self) -> None:
        self._on.stop()
        self._off.stop()


def cost(transport: str, turns: int) -> Sheet:
    """A row for each kind of work."""
    pair = Pair(transport)
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
    rows = []
    for title, with_it in on.items():
        without = sorted(off[title])
        fast = len(without) // 50
        first, later = min(with_it) / without[0], sorted(with_it)[fast] / without[fast]
        best = f"{without[0] * 1e6:.3f} us"
        rows.append((title, best, f"{first:.3f}", f"{later:.3f}", verdict(first <= 1 + AIM)))
    return Sheet(
        title=f"The flight recorder over {transport}",
        columns=("work", "fastest without", "fastest with", "fastest 2% with", f"aim {AIM:.0%}"),
        rows=tuple(rows),
        notes=(f"{turns} turns of 20 samples; with it: as multiples of without it",),
        figures={"seconds": {"with": on, "without": off}},
    )


def main(
    transport: Annotated[list[str] | None, typer.Option(help="shm or tcp; both by default")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of 20 samples of each work")] = 60,
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
