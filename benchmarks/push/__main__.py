"""Measure a push of weights beside other ways to bring them over."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import ray
import typer
from ray.exceptions import RayError

from benchmarks.push.memory import Temporary
from benchmarks.push.tiny import overhead
from benchmarks.push.ways import MIB, PEERS, Way, World, floor
from benchmarks.sheets import Json, Markdown, Output, Sheet, keeping
from fabric_ray.models import ModelConfig

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
_STORE = 4 << 30


class Found(msgspec.Struct, frozen=True):
    """What one way took."""

    name: str
    what: str
    seconds: list[float]
    """By turn."""
    ours: list[float]
    """Of a push of ours from and to the same processes, right before each turn."""
    verified: bool
    temporary: Temporary | None
    """Of the trainer that took most memory; ``None`` for floors."""


@app.command()
def push(
    layers: Annotated[int, typer.Option(help="15 make 2.1 GB in bf16", min=1)] = 15,
    trainers: Annotated[int, typer.Option(min=1)] = 4,
    tp: Annotated[int, typer.Option(min=1)] = 2,
    engines: Annotated[int, typer.Option(min=1)] = 2,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    fp8: Annotated[bool, typer.Option("--fp8", help="Rollouts hold fp8")] = False,
    peers: Annotated[bool, typer.Option(help="Also the other ways")] = True,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of the other ways: {', '.join(PEERS)}")
    ] = None,
    transport: Annotated[str, typer.Option(help="Of ours")] = "auto",
    watermark: Annotated[int, typer.Option(help="MiB a trainer, of ours", min=1)] = 128,
    json: Json = None,
    markdown: Markdown = False,
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
    out = Output("push", json, markdown=markdown)
    found: list[Found] = []
    nbytes = 0

    def measured() -> Sheet:
        nonlocal nbytes
        with keeping(lambda: _sheet(found, nbytes)):
            least = partial(floor, fp8=fp8)
            nbytes, first = _beside(open_world, least, turns, out.say, verify=not fp8)
            found.extend(first)
            for name in (only or PEERS) if peers and not fp8 else ():
                # Its own ours is verified by the first world's, and only its figures are new.
                try:
                    _, both = _beside(
                        open_world, PEERS[name], turns, out.say, verify=True, train=False
                    )
                except RayError as error:
                    # A way that needs more memory than there is must not cost the others' figures.
                    out.say(f"{name}: {str(error).strip().splitlines()[0]}")
                else:
                    found.extend(both[1:])
        return _sheet(found, nbytes)

    out.add(measured)
    out.end()


@app.command()
def tiny(
    tensors: Annotated[int, typer.Option(min=1)] = 10_000,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Thousands of tiny tensors: what planning and pushing cost beside the bytes."""
    out = Output("push-tiny", json, markdown=markdown)

    def measured() -> Sheet:
        found = overhead(tensors, turns)
        times = (f"{t * 1e3:.1f} ms" for t in (found.connect, found.push, found.push_fp8))
        return Sheet(
            title="tiny tensors",
            columns=("tensors", "bytes", "connect", "push", "push, made fp8"),
            rows=[(str(found.tensors), str(found.nbytes), *times)],
            figures=msgspec.to_builtins(found),
        )

    with _ray():
        out.add(measured)
    out.end()


def _beside(
    open_world: Callable[..., World],
    other: Callable[[World], Way],
    turns: int,
    say: Callable[[str], None],
    *,
    verify: bool,
    train: bool = True,
) -> tuple[int, list[Found]]:
    """Measures ours and another way turn by turn, in processes of their own; returns the bytes of a
    push as well."""
    with _ray(), tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        world = open_world(scratch=Path(scratch))
        try:
            ways = [world.ours(train=train), other(world)]
            found = _measure(ways, turns, say, verify=verify)
            return world.connected.nbytes, found
        finally:
            world.close()


def _measure(
    ways: list[Way], turns: int, say: Callable[[str], None], *, verify: bool
) -> list[Found]:
    wrong = {}
    for way in ways:
        say(f"checking {way.name}")
        # Compared with bytes that ours has brought; the first is compared with the trainers'.
        wrong[way.name] = way.wrong() if verify else []
        if wrong[way.name]:
            say(f"wrong: {', '.join(wrong[way.name][:3])}, ...")
    temporary = {way.name: way.took() for way in ways if way.took is not None}
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(turns):
        for way in ways:
            seconds[way.name].append(way.run())
            say(f"turn {turn + 1}: {way.name} {seconds[way.name][-1]:.3f} s")
    return [
        Found(
            way.name,
            way.what,
            seconds[way.name],
            seconds[ways[0].name],
            verified=not wrong[way.name],
            temporary=temporary.get(way.name),
        )
        for way in ways
    ]


def _sheet(found: list[Found], nbytes: int) -> Sheet:
    sheet = Sheet(
        title=f"{nbytes / 1e9:.2f} GB into all rollouts",
        columns=("way", "median s", "fastest s", "GB/s", "of ours", "trainer MB", "bytes"),
        notes=tuple(f"{one.name}: {one.what}" for one in found)
        + tuple(
            _bounded(one.temporary, one.temporary.watermark)
            for one in found
            if one.temporary is not None and one.temporary.watermark is not None
        ),
        figures={one.name: msgspec.to_builtins(one) for one in found},
    )
    for one in found:
        median = statistics.median(one.seconds)
        ratios = [theirs / ours for theirs, ours in zip(one.seconds, one.ours, strict=True)]
        cells = (
            f"{median:.3f}",
            f"{min(one.seconds):.3f}",
            f"{nbytes / median / 1e9:.2f}",
            f"{statistics.median(ratios):.2f}",
            "" if one.temporary is None else f"{one.temporary.peak / 1e6:.0f}",
            "right" if one.verified else "wrong",
        )
        sheet.rows.append((one.name, *cells))
    return sheet


def _bounded(taken: Temporary, watermark: int) -> str:
    """A trainer's memory beside the watermark."""
    return (
        f"peak extra memory of a trainer: {taken.peak / 1e6:.1f} MB, of which tensors are made "
        f"ready in {taken.ring / 1e6:.1f} MB; watermark {watermark / 1e6:.1f} MB, "
        f"peak {taken.peak / watermark:.3f} of it"
    )


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
