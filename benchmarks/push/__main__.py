"""Measure a push of weights beside other ways to bring them over."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import ray
import typer
from ray.exceptions import RayError

from benchmarks.push.tiny import overhead
from benchmarks.push.ways import MIB, PEERS, Way, World, floor
from fabric_ray.bench.record import Results, Resume, Turns, recorded
from fabric_ray.bench.results import Failure, Row, RowHeader, make_figure, make_row, row_of_turns
from fabric_ray.bench.turns import rotated
from fabric_ray.models import ModelConfig

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
_STORE = 4 << 30


@app.command()
def push(
    layers: Annotated[int, typer.Option(help="15 make 2.1 GB in bf16", min=1)] = 15,
    trainers: Annotated[int, typer.Option(min=1)] = 4,
    tp: Annotated[int, typer.Option(min=1)] = 2,
    engines: Annotated[int, typer.Option(min=1)] = 2,
    turns: Turns = 5,
    fp8: Annotated[bool, typer.Option("--fp8", help="Rollouts hold fp8")] = False,
    peers: Annotated[bool, typer.Option(help="Also the other ways")] = True,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of the other ways: {', '.join(PEERS)}")
    ] = None,
    transport: Annotated[str, typer.Option(help="Of ours")] = "auto",
    watermark: Annotated[int, typer.Option(help="MiB a trainer, of ours", min=1)] = 128,
    resume: Resume = None,
) -> None:
    """A model from FSDP trainers into replicas of a tensor-parallel engine."""
    if unknown := set(only or ()) - set(PEERS):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(PEERS)}")
    config = ModelConfig(
        kind="llama",
        vocab=32_000,
        hidden=2048,
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
    )
    open_world = partial(
        World,
        config,
        trainers=trainers,
        tp=tp,
        engines=engines,
        fp8=fp8,
        transport=transport,
        watermark=watermark * MIB,
    )
    with recorded("push", resume) as results:
        _beside(results, "floor", open_world, partial(floor, fp8=fp8), turns, verify=not fp8)
        for name in (only or PEERS) if peers and not fp8 else ():
            # Its own ours is verified by the first world's.
            try:
                _beside(results, name, open_world, PEERS[name], turns, train=False)
            except RayError as error:
                # A way that needs more memory than there is must not cost the others' figures.
                results.say(f"{name}: {str(error).strip().splitlines()[0]}")


@app.command()
def tiny(
    tensors: Annotated[int, typer.Option(min=1)] = 10_000,
    turns: Turns = 5,
    resume: Resume = None,
) -> None:
    """Thousands of tiny tensors: what planning and pushing cost beside the bytes."""
    with recorded("push-tiny", resume) as results:
        if results.has("push-tiny/connect"):
            return
        with _ray():
            found = overhead(tensors, turns)
        for name, seconds in found.items():
            header = RowHeader(key=f"push-tiny/{name}", unit="ms")
            details = {"ours": {"tensors": tensors}}
            results.add(row_of_turns(header, {"ours": ("ours", seconds)}, details))


def _beside(
    results: Results,
    name: str,
    open_world: Callable[..., World],
    other: Callable[[World], Way],
    turns: int,
    *,
    verify: bool = True,
    train: bool = True,
) -> None:
    """Measures ours and another way turn by turn, in processes of their own."""
    if results.has(f"push/{name}"):
        return
    with _ray(), tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        world = open_world(scratch=Path(scratch))
        try:
            header = RowHeader(key=f"push/{name}", unit="s")
            ways = [world.ours(train=train), other(world)]
            results.add(_measure(results, header, ways, turns, world, verify=verify))
        finally:
            world.close()


def _measure(
    results: Results, header: RowHeader, ways: list[Way], turns: int, world: World, *, verify: bool
) -> Row:
    failures: list[Failure] = []
    details: dict[str, dict[str, float | str]] = {}
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        results.say(f"checking {way.name}")
        # Compared with bytes that ours has brought; the first is compared with the trainers'.
        if wrong := way.wrong() if verify else []:
            failures.append(Failure(contender=way.name, reason=f"wrong: {', '.join(wrong[:3])}"))
        taken = way.took() if way.took is not None else None
        details[way.name] = {"GB": world.connected.nbytes / 1e9, **(taken.shown if taken else {})}
    for turn in range(turns):
        for way in rotated(ways, turn):
            seconds[way.name].append(way.run())
            results.say(f"turn {turn + 1}: {way.name} {seconds[way.name][-1]:.3f} s")
    figures = [
        make_figure(
            header,
            way.name,
            way.family,
            [[taken] for taken in seconds[way.name]],
            note=way.what,
            verified=verify and way.name not in {one.contender for one in failures},
            details=details[way.name],
        )
        for way in ways
    ]
    return make_row(header, figures, failures)


@contextmanager
def _ray() -> Iterator[None]:
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=_STORE,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    app()
