"""Sharded training: the same model and the same steps as in one process, each rank a share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig
from fabric_ray.models.boxes import InitialWeights, load_parameters
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.models.fsdp import (
    copy_task,
    full_tensors,
    join,
    leave,
    make_mesh,
    make_optimizer,
    serve_store,
    sharded_model,
    train_step,
)
from fabric_ray.models.transformer import Transformer
from tests.unit.models.small_models import SMALL

STEPS = 3

# Ranks are forks of one process that has imported torch: imports would take most of the time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "fabric_ray.models.fsdp"])


class Counting:
    """A source of weights that notes how much is asked of it."""

    def __init__(self, weights: InitialWeights) -> None:
        self.weights = weights
        self.elements = 0

    def box(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        part = self.weights.box(name, box)
        self.elements += part.numel()
        return part


def rows(config: ModelConfig, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return copy_task(config.vocab, batch=2, half=8, generator=generator)


def train(
    connection: Connection,
    port: int,
    rank: int,
    world: int,
    config: ModelConfig,
    replicas: int,
    directory: Path,
) -> None:
    torch.set_num_threads(1)
    join(rank=rank, world=world, address="127.0.0.1", port=port)
    source = Counting(InitialWeights(config))
    model = sharded_model(config, make_mesh(replicas=replicas), source)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    initial = InitialWeights(config)
    unchanged = all(torch.equal(full, initial[name]) for name, full in full_tensors(model))
    optimizer = make_optimizer(model)
    losses = [train_step(model, optimizer, rows(config, rank)) for _ in range(STEPS)]
    pairs = full_tensors(model)
    if rank == 0:
        save_checkpoint(directory, config, pairs)
    else:
        for _ in pairs:
            pass
    leave()
    connection.send((held, source.elements, unchanged, losses))


def run(
    world: int, *, replicas: int, config: ModelConfig, directory: Path
) -> list[tuple[int, int, bool, list[float]]]:
    store = serve_store("127.0.0.1", world=world)
    ends, processes = [], []
    for rank in range(world):
        mine, theirs = _CONTEXT.Pipe()
        arguments = (theirs, store.port, rank, world, config, replicas, directory)
        processes.append(_CONTEXT.Process(target=train, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(mine)
    try:
        # A rank that fails closes its end, and recv raises EOFError.
        return [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def trained_alone(config: ModelConfig, world: int) -> tuple[Transformer, list[float]]:
    """One process that sees every rank's rows."""
    model = Transformer(config)
    load_parameters(model, InitialWeights(config))
    optimizer = make_optimizer(model)
    batch = torch.cat([rows(config, rank) for rank in range(world)])
    return model, [train_step(model, optimizer, batch) for _ in range(STEPS)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world", "replicas"),
    # Three ranks split neither the 97 rows of the vocabulary nor the 32 of other parameters
    # evenly; ranks of the mixture see other tokens and so use other experts.
    [("llama", 3, 1), ("qwen3_moe", 4, 2)],
)
def test_sharded_training_is_training(name: str, world: int, replicas: int, tmp_path: Path) -> None:
    config = SMALL[name]
    results = run(world, replicas=replicas, config=config, directory=tmp_path)
    shards = world // replicas
    total = config.parameter_count
    held = [r[0] for r in results]
    assert sum(held) == total * replicas
    assert max(held) < total / shards * 1.25
    assert [r[1] for r in results] == held, "ranks read no more than they hold"
    assert all(r[2] for r in results), "the shards are those of the weights asked for"

    alone, losses = trained_alone(config, world)
    for step, loss in enumerate(losses):
        assert sum(r[3][step] for r in results) / world == pytest.approx(loss, abs=1e-4)
    after = Checkpoint(tmp_path)
    initial = InitialWeights(config)
    for parameter, expected in alone.named_parameters():
        torch.testing.assert_close(after[parameter], expected.detach(), atol=2e-5, rtol=1e-4)
    changed = [n for n in after if not torch.equal(after[n], initial[n])]
    assert len(changed) > 0.9 * len(after)


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    store = serve_store("127.0.0.1", world=1)
    join(rank=0, world=1, address="127.0.0.1", port=store.port, store=store)
    yield
    leave()


@pytest.mark.usefixtures("_group_of_one")
def test_ranks_that_make_no_replicas_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="1 ranks can't make 2 equal replicas"):
        make_mesh(replicas=2)
