"""The command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.rails import plots
from benchmarks.rails.simulator import (
    Policy,
    Report,
    SimulatorError,
    scenarios,
    simulate,
    simulate_all,
)
from benchmarks.rails.tables import losses, phases
from benchmarks.sheets import Json, Markdown, Output, Sheet, keeping, show

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
_STORY: tuple[Policy, ...] = ("adaptive", "round-robin")
# Around the loss of the scenario "watch".
_SPAN = (49.5, 52.5)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except SimulatorError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def measure(
    scenario: Annotated[
        list[str] | None, typer.Argument(help="Names, or files with a scenario in JSON")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time")] = 2,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Carry scenarios out by every policy, and say which aims are missed."""
    out = Output("rails", json, markdown=markdown)
    reports: list[Report] = []

    def measured() -> Sheet:
        with keeping(lambda: phases(reports)):
            for name in scenario or [known.name for known in scenarios() if known.name != "watch"]:
                out.say(name)
                reports.extend(simulate_all([name], jobs=jobs))
        return phases(reports)

    with _told():
        out.add(measured)
    out.add(lambda: losses(reports))
    out.end()


@app.command()
def failover(
    scenario: Annotated[str, typer.Argument(help="A name, or a file")] = "watch",
    policy: Annotated[str, typer.Option(help="adaptive, round-robin or random")] = "adaptive",
    around: Annotated[
        tuple[float, float], typer.Option(help="The ms of which slices are drawn")
    ] = _SPAN,
    out: Annotated[Path, typer.Option(help="The picture")] = Path("failover.png"),
) -> None:
    """Watch a rail die and return: draw its slices, and say what it cost."""
    with _told():
        report = simulate(scenario, msgspec.convert(policy, Policy), slices=around)
    plots.draw_failover(report, around, out)
    show(losses([report]))
    typer.echo(f"{report.summary.again:,} bytes were sent again; picture: {out}")


@app.command()
def draw(
    out: Annotated[Path, typer.Option(help="Folder for the pictures")] = Path("docs/img"),
) -> None:
    """Make the pictures of the documentation."""
    with _told():
        plots.draw_failover(simulate("watch", slices=_SPAN), _SPAN, out / "failover.png")
        plots.draw_story([simulate("story", policy) for policy in _STORY], out / "rails.png")
        blocks = [s.name for s in scenarios() if s.name.startswith("tent-") and "iB" in s.name]
        plots.draw_blocks(simulate_all(blocks), out / "rails-blocks.png")


if __name__ == "__main__":
    app()
