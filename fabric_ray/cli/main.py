"""``fabric-ray``: demos, plans, simulations, the doctor, the topology, and looks into engines."""

from __future__ import annotations

from typing import Annotated

import typer

from fabric_ray import __version__
from fabric_ray.cli import demo, doctor, plan, simulate, top, topo, trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(demo.app, name="demo")
app.command(name="doctor")(doctor.doctor)
app.command(name="plan")(plan.plan)
app.command(name="simulate")(simulate.simulate)
app.command(name="top")(top.top)
app.command(name="topo")(topo.topo)
app.command(name="trace")(trace.trace)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Moves LLM state between Ray actors."""
