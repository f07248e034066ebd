"""Rails that differ, slow down, die and return, by each policy, in the engine's simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from benchmarks.rails import plots
from benchmarks.rails.simulator import POLICIES, Policy, scenarios, simulate, simulate_all
from fabric_ray.bench.record import Resume, errors_told, recorded
from fabric_ray.bench.results import ContenderError, Family, Row, RowHeader, row_of_turns

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
FAMILIES: Mapping[str, Family] = {"adaptive": "ours", "floor": "floor"}
_STORY: tuple[Policy, ...] = ("adaptive", "round-robin")
# Around the loss of the scenario "watch".
_SPAN = (49.5, 52.5)


@app.command()
def measure(
    scenario: Annotated[
        list[str] | None, typer.Argument(help="Names, or files with a scenario in JSON")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time")] = 2,
    resume: Resume = None,
) -> None:
    """Carry scenarios out by every policy. The floor is what the rails that are up can carry."""
    with recorded("rails", resume) as results:
        for name in scenario or [known.name for known in scenarios() if known.name != "watch"]:
            if not any(key.startswith(f"rails/{name}/") for key in results.rows):
                results.say(name)
                results.add(*rows(simulate_all([name], jobs=jobs)))


def rows(reports: Sequence[SimpleNamespace]) -> Iterator[Row]:
    """Rates and P99 of each phase of one scenario, and what its losses and returns took."""
    by_policy = {report.policy: report.summary for report in reports}
    name = f"rails/{reports[0].scenario.name}"
    for phases in zip(*(summary.phases for summary in by_policy.values()), strict=True):
        found = dict(zip(by_policy, phases, strict=True))
        first = phases[0]
        key = f"{name}/{first.from_ms:g}-{first.to_ms:g} ms"
        taken = {
            n: 1 / (phase.settled * phase.capacity) for n, phase in found.items() if phase.settled
        }
        details = {
            n: {"share": phase.share or 0, "median us": phase.times.median_us or 0}
            for n, phase in found.items()
        }
        header = RowHeader(key=key, unit="GB/s", amount=1e9, aim="0.95 of floor")
        yield _row(header, {**taken, "floor": 1 / first.capacity}, details)
        slow = {n: phase.times.p99_us / 1e6 for n, phase in found.items() if phase.times.p99_us}
        yield _row(RowHeader(key=f"{key}, P99", unit="us"), slow)
    for loss in by_policy["adaptive"].losses:
        header = RowHeader(key=f"{name}/lost at {loss.at_ms:g} ms", unit="ms", aim="50 ms added")
        found = _at(by_policy, "losses", loss.at_ms)
        details = {p: {"in flight": x.in_flight, "added ms": x.added_ms} for p, x in found.items()}
        yield _row(header, {p: x.over_ms / 1e3 for p, x in found.items()}, details)
    for back in by_policy["adaptive"].returns:
        header = RowHeader(key=f"{name}/back at {back.at_ms:g} ms", unit="ms", aim="1000 ms")
        found = _at(by_policy, "returns", back.at_ms)
        taken = {p: x.recovered_ms for p, x in found.items() if x.recovered_ms is not None}
        yield _row(header, {p: ms / 1e3 for p, ms in taken.items()})


def _at(
    summaries: Mapping[str, SimpleNamespace], what: str, at_ms: float
) -> dict[str, SimpleNamespace]:
    found = {p: [x for x in getattr(s, what) if x.at_ms == at_ms] for p, s in summaries.items()}
    return {policy: one[0] for policy, one in found.items() if one}


def _row(
    header: RowHeader,
    seconds: Mapping[str, float],
    details: Mapping[str, Mapping[str, float]] = {},
) -> Row:
    families = {name: (FAMILIES.get(name, "peer"), [one]) for name, one in seconds.items()}
    return row_of_turns(header, families, details)


@app.command()
def failover(
    scenario: Annotated[str, typer.Argument(help="A name, or a file")] = "watch",
    policy: Annotated[str, typer.Option(help=", ".join(POLICIES))] = "adaptive",
    around: Annotated[
        tuple[float, float], typer.Option(help="The ms of which slices are drawn")
    ] = _SPAN,
    out: Annotated[Path, typer.Option(help="The picture")] = Path("failover.png"),
) -> None:
    """Watch a rail die and return: draw its slices, and say what it cost."""
    with errors_told(1, ContenderError):
        report = simulate(scenario, policy, slices=around)
    plots.draw_failover(report, around, out)
    for loss in report.summary.losses:
        typer.echo(f"{loss.at_ms:g} ms: rail {loss.rail} lost, {loss.in_flight} in flight")
        typer.echo(f"all over after {loss.over_ms:.2f} ms, {loss.added_ms:.2f} ms of it added")
    for back in report.summary.returns:
        recovered = "not" if back.recovered_ms is None else f"after {back.recovered_ms:.0f} ms"
        typer.echo(f"{back.at_ms:g} ms: rail {back.rail} back, 0.95 of all rails {recovered}")
    typer.echo(f"{report.summary.again:,} bytes were sent again; picture: {out}")


@app.command()
def draw(
    out: Annotated[Path, typer.Option(help="Folder for the pictures")] = Path("docs/img"),
) -> None:
    """Make the pictures of the documentation."""
    with errors_told(1, ContenderError):
        plots.draw_failover(simulate("watch", slices=_SPAN), _SPAN, out / "failover.png")
        plots.draw_story([simulate("story", policy) for policy in _STORY], out / "rails.png")
        blocks = [s.name for s in scenarios() if s.name.startswith("tent-") and "iB" in s.name]
        plots.draw_blocks(simulate_all(blocks), out / "rails-blocks.png")


if __name__ == "__main__":
    app()
