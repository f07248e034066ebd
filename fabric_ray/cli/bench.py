"""``fabric-ray bench``: what this machine moves between two processes, beside its floor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fabric_ray import bench as benches
from fabric_ray.bench.page import colours_of, draw_lines
from fabric_ray.bench.record import Resume
from fabric_ray.cli.console import plain, stdout
from fabric_ray.cli.ending import errors_in_words, fail
from fabric_ray.cli.options import Json
from fabric_ray.cli.picture import check_picture, save
from fabric_ray.cli.progress import working
from fabric_ray.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bench(
    transports: Annotated[
        str, typer.Option(help="With commas: shm, tcp, and verbs, libfabric with NICs.")
    ] = "shm,tcp",
    sizes: Annotated[
        str, typer.Option(help="Of a write, with commas: B, KiB, MiB.")
    ] = "4KiB,64KiB,1MiB,16MiB",
    turns: Annotated[
        int, typer.Option(help="How often each is measured; figures are medians.", min=1)
    ] = benches.TURNS,
    picture: Annotated[
        Path | None, typer.Option(help="Speed over size: FILE.svg, .png or .html.")
    ] = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """What this machine moves between two processes, beside what plain code does.

    Counted writes into the memory of another process, each to another place. The floor takes its
    turns in between: one thread that copies for shm, one socket on the loopback interface for tcp.
    Every byte is compared. The last rows are one trip of 8 bytes to a process that waits.

    \b
    Examples:
      fabric-ray bench                                 # ten seconds
      fabric-ray bench --transports tcp --sizes 256KiB,4MiB --turns 15
      fabric-ray bench --transports verbs              # over a NIC, both ends here
      fabric-ray bench --picture bench.html
      fabric-ray bench --resume bench.jsonl            # keeps rows, and goes on where it ended
      fabric-ray bench --json | jq '.figures[] | [.contender, .nbytes, .median]'

    In a clone, `make bench` measures more, beside other libraries. Exits with 2 where a transport
    doesn't work here, and says why.
    """
    try:
        results = benches.Results(resume)
    except (OSError, ValueError) as error:
        fail(f"--resume: {error}")
    try:
        with errors_in_words(), working("starting") as tell:
            if picture is not None:
                check_picture(picture)
            report = benches.measure(
                transports=[t.strip() for t in transports.split(",") if t.strip()],
                sizes=[nbytes(word) for word in sizes.split(",")],
                turns=turns,
                tell=tell,
                results=results,
            )
            if picture is not None:
                title = f"{report.cpu}, {report.cores} cores"
                save(_curves(report, title), title, picture)
    except KeyboardInterrupt:
        if results.rows and not as_json:
            stdout().print(_table(results.rows.values()))
        raise
    finally:
        with errors_in_words():
            results.end()
    if as_json:
        facts = {name: getattr(report, name) for name in ("cpu", "cores", "turns", "seconds")}
        typer.echo(json.dumps(facts | {"figures": [*_flat(report.rows)]}))
        return
    console = stdout()
    console.print(_table(report.rows))
    most = max(len(figure.turns) for row in report.rows for figure in row.figures)
    medians = f"{report.turns} turns" if most == report.turns else f"{report.turns} to {most} turns"
    console.print(
        f"{report.cpu}, {report.cores} cores; medians of {medians}; every byte was "
        f"compared; {report.seconds:.1f} s",
        highlight=False,
    )


def nbytes(word: str) -> int:
    """``64KiB`` as a number.

    Raises:
        InvalidArgument: it is no size.
    """
    found = re.fullmatch(r"(\d{1,12})(B|KiB|MiB|GiB)", word.strip())
    if found is None:
        raise InvalidArgument(f"--sizes: {word.strip()!r} is no size; say 512B, 64KiB or 1MiB")
    return int(found[1]) * _UNITS[found[2]]


def spoken(count: int) -> str:
    """The other way round."""
    name = next(n for n, unit in reversed(_UNITS.items()) if count % unit == 0)
    return f"{count // _UNITS[name]} {name}"


def _flat(rows: Iterable[benches.Row]) -> Iterable[dict[str, Any]]:
    """Figures with what their row says of them."""
    for row in rows:
        floor = next((f.contender for f in row.figures if f.family == "floor"), None)
        for found in sorted(row.figures, key=lambda f: f.family != "floor"):
            facts = {n: getattr(found, n) for n in ("median", "best", "of_floor", "verified")}
            yield {
                "contender": found.contender,
                "nbytes": row.size or benches.PING_NBYTES,
                "unit": row.unit,
                "floor": None if found.family == "floor" else floor,
                **facts,
            }


def _table(rows: Iterable[benches.Row]) -> Table:
    table = plain("write", "over", ">median", ">best", ">of the floor")
    last = 0
    for found in _flat(rows):
        of_floor = found["of_floor"]
        table.add_row(
            spoken(found["nbytes"]) if found["nbytes"] != last else "",
            found["contender"],
            f"{found['median']:.2f} {found['unit']}",
            f"{found['best']:.2f} {found['unit']}",
            "" if of_floor is None else f"{of_floor:.2f} x {found['floor']}",
        )
        last = found["nbytes"]
    return table


def _curves(report: benches.Report, title: str) -> Figure:
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.size]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, rows, colours_of(rows))
    axes.set_xlabel("bytes of a write")
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure
