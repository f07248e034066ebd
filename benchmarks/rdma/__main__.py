"""The command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from benchmarks.contenders import perf
from benchmarks.rdma.cases import Part, Row, judge
from benchmarks.rdma.suites import aims, beside_perftest, contenders, four_rails
from benchmarks.rdma.turns import packages
from benchmarks.rdma.unequal import unequal_rails
from benchmarks.sheets import Json, Markdown, Output, Sheet, verdict
from tests.rdma.boot import why_no_guest


def writes(rows: Sequence[Row]) -> Sheet:
    """A line for each case and contender, with the aim that it has."""
    sheet = Sheet(
        title="soft-RoCE",
        columns=("case", "contender", "MB/s", "messages/s", "times", "beside", "aim"),
        figures={"rows": msgspec.to_builtins(rows)},
    )
    first: dict[str, Row] = {}
    for row in rows:
        reference = first.setdefault(row.case, row)
        found = [
            v
            for v in judge(rows, aims())
            if (v.aim.case, v.aim.contender) == (row.case, row.contender)
        ]
        beside = found[0].aim.beside if found else reference.contender
        ratio = found[0].ratio if found else row.ratio(reference)
        cells = (
            f"{row.bytes_per_second / 1e6:.1f}",
            f"{row.messages_per_second:.0f}",
            f"{ratio:.3f}",
            beside if row is not reference else "",
            f"{found[0].aim.least}: {verdict(found[0].met)}" if found else "",
        )
        sheet.rows.append((row.case, row.contender, *cells))
    return sheet


def steps(parts: Sequence[Part]) -> Sheet:
    """A line for each step by each policy."""
    times = ("median, ms", "P99, ms", "0.95 after, ms")
    sheet = Sheet(
        title="unequal soft-RoCE rails",
        columns=("step", "policy", "share of what is up", *times),
        figures={"parts": msgspec.to_builtins(parts)},
    )
    for part in parts:
        recovered = "-" if part.recovered_ms is None else f"{part.recovered_ms:.0f}"
        cells = (f"{part.median_ms:.0f}", f"{part.p99_ms:.0f}", recovered)
        sheet.rows.append((part.step, part.policy, f"{part.share:.3f}", *cells))
    return sheet


def main(
    turns: Annotated[int, typer.Option(min=1, help="Turns per contender and case")] = 5,
    rails: Annotated[bool, typer.Option(help="Measure four rails beside one as well")] = True,
    unequal: Annotated[bool, typer.Option(help="Unequal rails that slow down and fail")] = False,
    single: Annotated[bool, typer.Option(help="Measure one rail beside perftest")] = True,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Measure writes between devices of the soft-RoCE guest, beside perftest."""
    out = Output("rdma", json, markdown=markdown)
    reason = why_no_guest(*packages(contenders()))
    if reason is not None:
        out.say(f"no soft-RoCE guest: {reason}")
        raise typer.Exit(2)
    if why := perf.missing():
        out.say(f"{why}; run `{perf.OBTAIN}`")
    try:
        if single:
            out.add(lambda: writes(beside_perftest(turns=turns)))
        if rails and not why:
            out.add(lambda: writes(four_rails(turns=turns)))
        if unequal and not why:
            out.add(lambda: steps(unequal_rails()))
    except ValueError as error:
        out.say(str(error))
        raise typer.Exit(1) from error
    out.end()


if __name__ == "__main__":
    typer.run(main)
