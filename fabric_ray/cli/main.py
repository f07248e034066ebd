"""``fabric-ray``: demos, plans, simulations, measurements, the doctor, looks into engines."""

from __future__ import annotations

from typing import Annotated

import typer

from fabric_ray import __version__
from fabric_ray.cli import bench, demo, doctor, plan, simulate, top, topo, trace
from fabric_ray.cli.ending import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Help is read as it is written, with its examples.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="What works on this machine, and why the rest doesn't.")(doctor.doctor)
app.command(short_help="Which NICs are near which GPU.")(topo.topo)
app.command(short_help="How fast bytes move here, beside the floor.")(bench.bench)
app.command(short_help="What a weight push of your model would be.")(plan.plan)
app.command(short_help="How long it would take, on a virtual clock.")(simulate.simulate)
app.command(short_help="What engines did: transfers, a timeline.")(trace.trace)
app.command(short_help="What engines do now: links, rates, health.")(top.top)
app.add_typer(demo.app, name="demo", short_help="The main jobs, for real, on this machine.")


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
    """Moves LLM state between Ray actors: weights, KV pages, tokens of experts.

    \b
    Where to begin:
      fabric-ray doctor                # what this machine can do
      fabric-ray bench                 # how fast it does it
      fabric-ray demo weights          # a weight push, every byte checked
      fabric-ray plan --help           # what a push of your model would be

    Every command has --help with examples, and --json for scripts: one object on stdout, progress
    and errors on stderr. All end with 0 if it was done, 1 if the answer is no (something doesn't
    work, a check failed, nothing is there to show), 2 if it can't be done as asked.
    """
