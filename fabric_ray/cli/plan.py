"""``fabric-ray plan``: what a weight push would be, before there is a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import typer

from fabric_ray.cli import options, words
from fabric_ray.cli.console import facts, ranges, stdout
from fabric_ray.cli.ending import errors_in_words
from fabric_ray.cli.options import size
from fabric_ray.cli.picture import check_picture, draw
from fabric_ray.cli.progress import working
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Plan, PlanError
from fabric_ray.weights.forecast import Forecast, forecast


def plan(
    model: options.Model,
    trainer: options.Trainer,
    rollout: options.Rollout,
    dtype: options.Dtype = "bfloat16",
    nic: Annotated[float, typer.Option(help="Gb/s of each rank's NIC.", min=1e-3)] = 400.0,
    as_json: options.Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Bytes from each trainer to each rollout: FILE.svg, .png or .html."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="List the boxes of this container or tensor, with senders.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="List what this rollout receives, equal layers and experts as one row."),
    ] = None,
) -> None:
    """What a weight push of a model would be: bytes, balance, the floor of its time.

    Nothing is allocated and nothing is sent: no tensor, GPU or cluster is needed. The floor is what
    the busiest rank sends or receives, over the speed of its NIC.

    \b
    Examples:
      fabric-ray plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4
      fabric-ray plan kimi-k2 --trainer fsdp=16,pp=2,ep=8 \\
          --rollout tp=1,dp=32,ep=32,engines=4 --dtype fp8:128x128
      fabric-ray plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4,engines=2 \\
          --picture plan.html                     # bytes between all ranks
      fabric-ray plan ./my-model/config.json --trainer megatron:tp=2,dp=4 \\
          --rollout tp=2 --explain model.norm.weight
      fabric-ray plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4 \\
          --rank 1                                # what this rollout receives
      fabric-ray plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4 --json \\
          | jq .floor_seconds

    Exits with 2 where there is no such push: an unknown model, sizes that don't fit.
    """
    with errors_in_words(), working("planning") as tell:
        words.finite("--nic", nic, "Gb/s such as 400")
        if picture is not None:
            check_picture(picture)
        planned, predicted = forecast(options.push(model, trainer, rollout, dtype))
        explained = None
        if explain is not None or (rank is not None and as_json):
            explained = _explained(planned, explain, rank)
        elif rank is not None:
            _check_rank(planned, rank)
        if picture is not None:
            tell("drawing")
            draw(planned, f"{model} as {dtype}\n{trainer} to {rollout}", picture)
    if as_json:
        said = {"model": model, "trainer": trainer, "rollout": rollout, "dtype": dtype}
        typer.echo(json.dumps(said | summary(predicted, nic) | {"explained": explained}))
        return
    stdout().print(facts(_rows(model, dtype, predicted, nic)))
    # Names of containers stay whole: a terminal breaks lines that are too long for it.
    if explained is not None:
        typer.echo(explained)
    elif rank is not None:
        typer.echo(f"\nrollout rank {rank} receives")
        for line in _received(planned, rank):
            typer.echo(line)
        typer.echo(
            "add --explain NAME to list the boxes of a container, or --json for those of all"
        )


def summary(predicted: Forecast, nic: float) -> dict[str, Any]:
    """What ``--json`` prints of a forecast: its fields, and the floor for NICs of ``nic`` Gb/s."""
    fields: dict[str, Any] = msgspec.to_builtins(predicted, str_keys=True)
    return fields | {
        "gathered": [],
        "nic_gbps": nic,
        "busiest_nbytes": predicted.busiest_nbytes,
        "floor_seconds": predicted.floor_seconds(nic),
    }


def _explained(planned: Plan, name: str | None, rank: int | None) -> str:
    if rank is not None:
        _check_rank(planned, rank)
    try:
        return planned.explain(name, rank=rank)
    except PlanError:
        known = dict.fromkeys((*planned.containers("target"), *planned.containers("source")))
        if name is None or name in known:
            raise
        parts = [each for each in known if name in each]
        near = (parts or get_close_matches(name, known, n=1))[:1]
        raise InvalidArgument(
            f"--explain: got {name!r}, expected the name of a container or a tensor"
            f"{''.join(f', such as {each}' for each in near)}; "
            "give --rank 0 instead to list the containers"
        ) from None


def _check_rank(planned: Plan, rank: int) -> None:
    known = planned.ranks("target")
    if rank not in known:
        raise InvalidArgument(
            f"--rank: got {rank}, expected the rank of a rollout, {', '.join(ranges(known))}; "
            "give one of these"
        )


def _received(planned: Plan, rank: int) -> Iterator[str]:
    """What a rollout receives, a line for the containers whose names differ in numbers only."""
    names = planned.containers("target")
    senders: dict[str, set[int]] = {}
    copies = planned.for_target(rank)
    for peer, index in {*zip(copies.peer.tolist(), copies.dst_container.tolist(), strict=True)}:
        senders.setdefault(_pattern(names[index]), set()).add(peer)
    count: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for container in planned.local_containers("target", rank):
        name = _pattern(container.name)
        count[name] = count.get(name, 0) + 1
        nbytes[name] = nbytes.get(name, 0) + container.nbytes
    yield f"{'number':>6}  {'bytes':>9}  {'from trainers':<13}  container"
    for name in count:
        peers = tuple(sorted(senders.get(name, ())))
        runs = [*ranges(peers)]
        said = ",".join(runs) if len(runs) < 3 else f"{len(peers)} of {peers[0]}-{peers[-1]}"
        yield f"{count[name]:>6}  {size(nbytes[name]):>9}  {said or 'none':<13}  {name}"


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _rows(model: str, dtype: str, predicted: Forecast, nic: float) -> list[tuple[str, str]]:
    balance = predicted.balance
    sent, received = [*balance.sent.values()], [*balance.received.values()]
    bound = "sending" if max(sent) > max(received) else "receiving"
    gathered = "nothing; every rank sends from what it holds"
    if predicted.exchanged_maxima:
        gathered = (
            "nothing; before a push the busiest trainer shares "
            f"{predicted.exchanged_maxima:,} maxima of blocks with others"
        )
    took = ", ".join(f"{what} {spent.cpu_seconds:.1f}" for what, spent in predicted.spent.items())
    rows = [
        ("model", f"{model}, {predicted.parameters / 1e9:.2f} B parameters, pushed as {dtype}"),
        ("pushed", f"{size(balance.nbytes)}, {len(sent)} trainers to {len(received)} rollouts"),
        ("a rollout receives", _range(received)),
        ("a trainer sends", _range(sent)),
        (
            "busiest over mean",
            f"senders {balance.sender_imbalance:.3f}, receivers {balance.receiver_imbalance:.3f}, "
            f"pairs {balance.link_imbalance:.2f} ({predicted.links:,} pairs)",
        ),
        ("floor", f"{predicted.floor_seconds(nic):.3f} s of {bound}, {nic:g} Gb/s a rank"),
        ("with relay", _relayed(predicted)),
        ("held by", ", ".join(_held(count, nbytes) for count, nbytes in predicted.holders.items())),
        ("gathered", gathered),
        ("computed after it", ", ".join(predicted.derived) or "nothing"),
        ("copies", f"{predicted.copies:,}, of which {predicted.copies_stored:,} are stored"),
        ("plan", f"{size(predicted.encoded_nbytes)} encoded; seconds of one core: {took}"),
        ("peak memory", f"{size(predicted.peak_nbytes)} of this process"),
    ]
    return rows


def _relayed(predicted: Forecast) -> str:
    """What it would change if rollouts that hold the same passed weights on."""
    sent, received = predicted.balance.sent, predicted.balance.received.values()
    if predicted.once_nbytes == predicted.balance.nbytes:
        return "the same; no two rollouts hold the same"
    each = predicted.once_nbytes / len(sent)
    gain = (
        "" if max(sent.values()) > max(received) else "; no gain, rollouts receive more than that"
    )
    return f"a trainer sends {size(each)} on average{gain}"


def _held(count: int, nbytes: int) -> str:
    return f"{count} trainer{'s' * (count > 1)}: {size(nbytes)}"


def _range(nbytes: list[int]) -> str:
    low, high = size(min(nbytes)), size(max(nbytes))
    if low == high:
        return low
    return f"{low} to {high}, {size(round(fmean(nbytes)))} on average"
