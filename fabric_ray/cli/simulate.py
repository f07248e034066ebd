"""``fabric-ray simulate``: how long a weight push would take, on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fabric_ray.cli import options, words
from fabric_ray.cli.console import facts, stdout
from fabric_ray.cli.ending import errors_in_words
from fabric_ray.cli.options import size
from fabric_ray.cli.picture import check_picture
from fabric_ray.cli.progress import working
from fabric_ray.cli.published import Published, published
from fabric_ray.cli.sensitivity import sensitivity
from fabric_ray.plan import Plan
from fabric_ray.weights.forecast import forecast
from fabric_ray.weights.simulation import Cluster, Setting, Simulated
from fabric_ray.weights.simulation import simulate as simulate_push


def simulate(
    model: options.Model,
    trainer: options.Trainer,
    rollout: options.Rollout,
    dtype: options.Dtype = "bfloat16",
    nics: Annotated[int, typer.Option(help="NICs of each rank.", min=1, max=4)] = 1,
    gbps: Annotated[
        float, typer.Option("--gbps", "--nic", help="Gb/s of each NIC.", min=1e-3, max=1e6)
    ] = 400.0,
    latency: Annotated[
        float, typer.Option(help="us of every delivery, one way.", min=0.0, max=3.6e9)
    ] = 2.0,
    watermark: Annotated[
        float | None,
        typer.Option(
            help="MiB of a trainer's temporary memory; 256, or its largest tensor.",
            min=1e-3,
            max=2**30,
        ),
    ] = None,
    gather: Annotated[
        bool, typer.Option("--gather", help="Gather whole tensors before sending them.")
    ] = False,
    costs: Annotated[
        str, typer.Option(help="us of a call, instead of fabric-lib's: h2d=0,submit=5,...")
    ] = "",
    page: Annotated[
        float, typer.Option(help="MiB that are simulated as one write.", min=1e-3, max=1024.0)
    ] = 4.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--sensitivity", help="Time over NICs, watermark and gather: FILE.svg, .png or .html."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """How long a weight push of a model would take, and what the time would go to.

    The plan, the steps and the group are those of a real push; NICs and time are simulated.

    \b
    Examples:
      fabric-ray simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=2,engines=4
      fabric-ray simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=2,engines=4 \\
          --dtype fp8:128x128 --nics 2 --costs h2d=0
      fabric-ray simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=2,engines=4 \\
          --sensitivity push.html                 # time over NICs and watermark
      fabric-ray simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=4 --json \\
          | jq .seconds

    Exits with 2 where there is no such push, or it doesn't fit the setting.
    """
    with errors_in_words(), working("planning") as tell:
        if plot is not None:
            check_picture(plot, option="--sensitivity")
        page_nbytes = _nbytes("--page", page, "MiB such as 4")
        words.finite("--gbps", gbps, "Gb/s such as 400")
        words.finite("--latency", latency, "us such as 2")
        cluster = Cluster(nics=nics, gbps=gbps, latency=latency / 1e6, page=page_nbytes)
        kept = None
        if watermark is not None:
            kept = _nbytes("--watermark", watermark, "MiB such as 256")
        setting = Setting(cluster=cluster, costs=words.costs(costs), watermark=kept, gather=gather)
        push = options.push(model, trainer, rollout, dtype)
        planned, _ = forecast(push)
        tell("simulating")
        simulated = simulate_push(push, planned, setting)
        if plot is not None:
            tell("simulating other settings")
            title = f"{model} as {dtype}\n{trainer} to {rollout}"
            sensitivity(push, planned, setting, title, plot)
    known = published(push)
    if as_json:
        said = {"model": model, "trainer": trainer, "rollout": rollout, "dtype": dtype}
        typer.echo(json.dumps(said | summary(simulated, setting, known)))
        return
    rows = _rows(f"{model}, pushed as {dtype}", planned, simulated, setting, known)
    stdout().print(facts(rows))


def _nbytes(option: str, mebibytes: float, example: str) -> int:
    return round(words.finite(option, mebibytes, example) * 2**20)


def summary(simulated: Simulated, setting: Setting, known: Published | None) -> dict[str, Any]:
    """What ``--json`` prints: all of what was found, and in which setting."""
    fields: dict[str, Any] = msgspec.to_builtins(simulated)
    said: dict[str, Any] = msgspec.to_builtins(setting)
    milliseconds = known.milliseconds if known else {}
    # The setting's may be the default; the watermark that was kept is among the fields.
    return said | fields | {"ratio": simulated.ratio, "published_ms": milliseconds}


def _rows(
    model: str, plan: Plan, simulated: Simulated, setting: Setting, known: Published | None
) -> list[tuple[str, str]]:
    balance, cluster = plan.balance(), setting.cluster
    sent, received = len(balance.sent), len(balance.received)
    bound = (
        "sending" if max(balance.sent.values()) > max(balance.received.values()) else "receiving"
    )
    busy = ", ".join(f"{stage} {_ms(s)}" for stage, s in simulated.busy.items() if s)
    path = sorted(simulated.critical.items(), key=lambda stage: -stage[1])
    return [
        ("model", model),
        ("pushed", f"{size(balance.nbytes)}, {sent} trainers to {received} rollouts"),
        (
            "floor",
            f"{_ms(simulated.floor_seconds)} of {bound}, "
            f"{cluster.nics} x {cluster.gbps:g} Gb/s a rank",
        ),
        ("simulated", f"{_ms(simulated.seconds)}, {simulated.ratio:.3f} times the floor"),
        ("published", _published(known)),
        ("goes to", ", ".join(f"{s} {_ms(t)} ({t / simulated.seconds:.0%})" for s, t in path if t)),
        ("a trainer's stages", f"{busy}; then it waits {_ms(simulated.waiting)} for the others"),
        (
            "a trainer's calls",
            f"{simulated.tensors:,.0f} tensors, {simulated.calls:,.0f} submits of "
            f"{simulated.requests:,.0f} requests",
        ),
        (
            "temporary memory",
            f"{size(simulated.peak_nbytes)} at most, watermark {size(simulated.watermark)}; "
            + ("whole tensors" if setting.gather else "shards"),
        ),
        ("simulated as", f"{simulated.posted:,} writes of at most {size(cluster.page)}"),
    ]


def _published(known: Published | None) -> str:
    if known is None:
        return "nothing of this push"
    times = ", ".join(f"{means} {ms:,.0f} ms" for means, ms in known.milliseconds.items())
    return f"{times} ({known.source})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
