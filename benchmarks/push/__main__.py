"""Measure a push of weights beside what else brings them over."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray.exceptions import RayError

from benchmarks.push.contenders import MIB, PEERS, Contender, World
from benchmarks.push.delta import measure
from benchmarks.push.tiny import overhead
from fabric_ray.bench.record import Results, Resume, Turns, errors_told, recorded
from fabric_ray.bench.results import ContenderError, Failure, RowHeader, row_of_turns
from fabric_ray.bench.turns import Entry, take_turns
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
    peers: Annotated[bool, typer.Option(help="Also the peers")] = True,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of the peers: {', '.join(PEERS)}")
    ] = None,
    transport: Annotated[str, typer.Option(help="Of ours")] = "auto",
    watermark: Annotated[int, typer.Option(help="MiB a trainer, of ours", min=1)] = 128,
    resume: Resume = None,
) -> None:
    """A model from FSDP trainers into replicas of a tensor-parallel engine."""
    if unknown := set(only or ()) - set(PEERS):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(PEERS)}")
    sizes = {"vocab": 32_000, "hidden": 2048, "intermediate": 8192}
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 64}
    config = ModelConfig(kind="llama", layers=layers, **sizes, **heads)
    sides = {"trainers": trainers, "tp": tp, "engines": engines, "fp8": fp8}
    world = partial(World, config, **sides, transport=transport, watermark=watermark * MIB)
    with recorded("push", resume) as results:
        _beside(results, "floor", world, World.floor, turns, verify=not fp8)
        for name in (only or PEERS) if peers and not fp8 else ():
            # Its own ours is verified by the first world's.
            try:
                _beside(results, name, world, PEERS[name], turns, train=False)
            except RayError as error:
                # A peer that needs more memory than there is must not cost the others' figures.
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


@app.command()
def delta(
    layers: Annotated[int, typer.Option(help="140 MB each", min=1)] = 4,
    gbps: Annotated[float, typer.Option(help="Of the link, Gb/s", min=0.1)] = 25.0,
    share: Annotated[
        list[float] | None, typer.Option(help="Of elements that change; may be repeated")
    ] = None,
    turns: Turns = 5,
    resume: Resume = None,
) -> None:
    """Pushes of what changed, always and as delta=True chooses, beside whole ones, between two
    network namespaces (root)."""
    shares = share or [0.0, 0.01, 0.03, 0.1, 1.0]
    with recorded("push-delta", resume) as results:
        for row in measure(layers, gbps, shares, turns, results.say):
            results.add(row)


@app.command()
def vllm(
    layers: Annotated[int, typer.Option(help="20 make 390 MB in bf16", min=1)] = 20,
    turns: Turns = 5,
    backends: Annotated[bool, typer.Option(help="Also try vLLM's own, which need GPUs")] = True,
    resume: Resume = None,
) -> None:
    """A real vLLM server on CPUs, from two FSDP2 ranks: our paths beside vLLM's own."""
    from benchmarks.kvcache.vllm_setups import versions
    from benchmarks.push.vllm_updates import measure, try_backends
    from tests.adapters.vllm import servers

    if servers.MISSING is not None:
        raise typer.BadParameter(servers.MISSING)
    with errors_told(2, ContenderError):
        found = versions()
    options = {**found, "layers": str(layers), "turns": str(turns)}
    with recorded("push-vllm", resume, options=options) as results:
        measure(layers, turns, results)
        if backends:
            try_backends(results)


def _beside(
    results: Results,
    name: str,
    open_world: Callable[..., World],
    other: Callable[[World], Contender],
    turns: int,
    *,
    verify: bool = True,
    train: bool = True,
) -> None:
    """Measures ours and another contender turn by turn, in processes of their own."""
    if results.has(f"push/{name}"):
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with _ray(), tempfile.TemporaryDirectory(dir=memory) as scratch:
        world = open_world(scratch=Path(scratch))
        try:
            header = RowHeader(key=f"push/{name}", unit="s")
            failures: list[Failure] = []
            entries = []
            for contender in (world.ours(train=train), other(world)):
                results.say(f"checking {contender.name}")
                # Compared with bytes that ours has brought; the first is compared with the
                # trainers'.
                wrong = contender.wrong() if verify else []
                if wrong:
                    reason = f"wrong: {', '.join(wrong[:3])}"
                    failures.append(Failure(contender=contender.name, reason=reason))
                taken = contender.took()
                facts: dict[str, Any] = {
                    "note": contender.what,
                    "verified": verify and not wrong,
                    "details": {
                        "GB": world.connected.nbytes / 1e9,
                        **(taken.shown if taken else {}),
                    },
                }
                family, run = contender.family, contender.run
                entries.append(
                    Entry(name=contender.name, family=family, run=run, facts=partial(dict, facts))
                )
            take_turns(
                header,
                entries,
                turns,
                results,
                failures=failures,
                on_turn=lambda entry, turn: results.say(f"turn {turn}: {entry.name}"),
            )
        finally:
            world.close()


@contextmanager
def _ray() -> Iterator[None]:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    store: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _STORE}
    ray.init(address="local", **quiet, **store)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    app()
