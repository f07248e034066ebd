"""Trainers whose tensors can't tell where they belong are given a side that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Side
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.families import post_load, target_side
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.trainers import Parallel, megatron_side
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import LAID_OUT
from tests.unit.plan.fake_group import as_rank
from tests.unit.trainers.megatron_rules import Rank, Sizes
from tests.unit.weights.local_sync import InProcess

CONFIG = LAID_OUT["deepseek_v3"]
SIZES = Sizes(tp=2, pp=2, ep=2)
SIDE = megatron_side(CONFIG, Parallel(tp=2, pp=2, ep=2, etp=1))
FULL = noise(CONFIG)
TP = 2

Tensors = dict[str, torch.Tensor]


def held(rank: int) -> Tensors:
    return Rank(
        CONFIG, FULL, SIZES, rank, stages=[2, 2], te=True, grouped=True, vocab_multiple=128
    ).tensors()


@pytest.fixture
def open_sync() -> Iterator[Callable[..., WeightSync]]:
    """Makes controllers of four trainers with these sides and tensors, and of two rollouts."""
    parts: list[WeightSource | WeightTarget] = []
    engines: list[TransferEngine] = []

    def engine(who: str) -> TransferEngine:
        engines.append(TransferEngine(name=who, transport="shm"))
        return engines[-1]

    def open_(
        sides: list[Side | None] | None = None, tensors: dict[int, Tensors] | None = None
    ) -> WeightSync:
        trainers = [f"trainer {i}" for i in range(SIZES.world)]
        rollouts = [f"rollout {i}" for i in range(TP)]
        for i, who in enumerate(trainers):
            mine = (tensors or {}).get(i) or held(i)
            side = sides[i] if sides else SIDE
            parts.append(WeightSource(mine, rank=i, side=side, name=who, engine=engine(who)))
        target = target_side(CONFIG, tp=TP)
        for i, who in enumerate(rollouts):
            parts.append(WeightTarget(target, rank=i, name=who, engine=engine(who)))
        return WeightSync(trainers, rollouts, digest=True, timeout=5.0, calls=InProcess())

    open_.targets = lambda: [p for p in parts if isinstance(p, WeightTarget)]  # type: ignore[attr-defined]
    yield open_
    for part in parts:
        part.close()
    for each in engines:
        each.close()


def test_megatron_ranks_push_to_tensor_parallel_rollouts(open_sync) -> None:
    sync = open_sync()
    targets = open_sync.targets()
    derived: dict[int, Tensors] = {}
    for target in targets:
        target.on_commit(lambda _, t=target: derived.update({t.rank: post_load(CONFIG, t.weights)}))
    assert sync.push().version == 1
    for rank, target in enumerate(targets):
        expected = expected_containers(CONFIG, FULL, tp=TP, rank=rank)
        assert_same(target.weights, expected)
        assert_same(derived[rank], post_load(CONFIG, expected))
    assert len(derived[0]) == 2 * CONFIG.layers


def test_every_trainer_must_be_given_the_same_side(open_sync) -> None:
    other = megatron_side(CONFIG, Parallel(tp=2, pp=2, ep=1, etp=1))
    sync = open_sync([SIDE, SIDE, other, SIDE])
    with pytest.raises(InvalidArgument, match="trainer 2 has another side than trainer 0"):
        sync.connect()


def test_some_with_a_side_and_some_without_are_refused(open_sync) -> None:
    sync = open_sync([SIDE, None, SIDE, SIDE])
    with pytest.raises(InvalidArgument, match=r"trainer 1 .*another side than trainer 0, or none"):
        sync.connect()


def test_a_side_of_more_trainers_than_there_are_is_refused(open_sync) -> None:
    more = megatron_side(CONFIG, Parallel(tp=2, pp=2, dp=2))
    sync = open_sync([more] * 4)
    with pytest.raises(InvalidArgument, match="expected 4 ranks from 0; give the side of exactly"):
        sync.connect()


def test_a_rank_outside_its_side_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 4 is not among the side's ranks"):
        WeightSource(held(0), rank=4, side=SIDE, name="bad")


def test_rs_1_a_rank_of_a_side_that_is_another_in_torch_is_refused(
    open_engine: Callable[..., TransferEngine],
) -> None:
    source = WeightSource(
        held(1), rank=0, side=SIDE, name="swapped", engine=open_engine("swapped", transport="shm")
    )
    try:
        words = r"rank is 0, and this process is rank 1 of 4 in torch.distributed; .*get_rank\(\)"
        with as_rank(1, SIZES.world), pytest.raises(InvalidArgument, match=words):
            source.meta()
        # Trainers may be a part of the processes, and then have other numbers.
        for rank, world in [(0, SIZES.world), (1, 2 * SIZES.world)]:
            with as_rank(rank, world):
                assert source.meta()[0] == 0
    finally:
        source.close()


NORM = "decoder.layers.0.input_layernorm.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def changed(change: Callable[[Tensors], object]) -> dict[int, Tensors]:
    tensors = held(1)
    change(tensors)
    return {1: tensors}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"`{NORM}` of rank 1 is among the side but not among the tensors"),
        (lambda t: t.update(odd=t[NORM]), "`odd` of rank 1 is among the tensors but not"),
        (lambda t: t.update({NORM: t[NORM][:-1]}), r"is float32 \[31\] here and float32 \[32\]"),
        (lambda t: t.update({NORM: t[NORM].half()}), r"is float16 \[32\] here"),
        (
            lambda t: t.update({FC2: t[FC2].t().contiguous().t()}),
            r"strides \[4, 128\] .*contiguous",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype", "strides"],
)
def test_tensors_that_contradict_the_side_are_refused_before_anything_is_sent(
    open_sync, change, words
) -> None:
    sync = open_sync(tensors=changed(change))
    with pytest.raises(WeightSyncError, match=words) as caught:
        sync.push()
    assert set(caught.value.failed) == {"trainer 1"}
    for target in open_sync.targets():
        assert target.version is None
