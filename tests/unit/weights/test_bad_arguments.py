"""What means nothing is refused where it is said, before any actor is asked."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource
from tests.unit.weights.local_sync import side

TENSORS = {"w": torch.zeros(8, 6, dtype=torch.int16)}


def replica_source(**options: Any) -> ReplicaSource:
    return ReplicaSource(TENSORS, LayoutReplica(side()), name="bad", **options)


@pytest.mark.parametrize("rank", [-1, 1.0, "0"])
def test_a_rank_that_no_trainer_has_is_refused(rank: Any) -> None:
    words = rf"rank is {rank!r}; give this trainer's index in WeightSync\(trainers=\.\.\.\), from 0"
    with pytest.raises(InvalidArgument, match=words):
        WeightSource(TENSORS, rank=rank, name="bad")
    with pytest.raises(InvalidArgument, match=words):
        replica_source(rank=rank)


def test_a_collected_source_frees_its_name() -> None:
    """At once: one that waits for the garbage collector would be in the next one's way."""
    gc.disable()
    try:
        for _ in range(2):
            WeightSource(TENSORS, rank=0, name="one after the other")
            ReplicaSource(TENSORS, LayoutReplica(side()), rank=0, name="another after the other")
    finally:
        gc.enable()


def test_a_rank_that_no_rollout_has_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"rank -1 is not among the side's ranks \(0, 1\)"):
        WeightTarget(side(), rank=-1, name="bad")


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ([torch.nn.Linear(2, 2)], {}, "side is Linear, expected a fabric_ray.plan.Side; call Wei"),
        (
            [TENSORS],
            {},
            r"side is dict, .*; call WeightTarget\(into=module\) or WeightTarget\(side, rank=rank",
        ),
        ([side(), torch.nn.Linear(2, 2)], {}, "2 positional arguments, .* second is Linear"),
        ([side()], {"into": 3}, "into is int, expected a module or a mapping of names to tensors"),
    ],
)
def test_arguments_in_the_place_of_others_are_refused(
    args: list[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        WeightTarget(*args, rank=0, name="bad", **options)


def test_a_stage_before_the_first_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="stage is -1; number pipeline stages from 0"):
        replica_source(rank=0, stage=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leave": "draft.*"}, r"leave is 'draft\.\*', expected a tuple of patterns"),
        ({"leave": None}, "leave is None, expected a tuple of patterns"),
        ({"leave": [""]}, "leave names '', expected a pattern such as 'draft"),
        ({"lost": "maybe"}, "lost is 'maybe', expected 'raise' or 'drop'"),
    ],
)
def test_words_that_a_controller_does_not_know_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        WeightSync(["trainer"], ["rollout"], **options)


def test_a_config_is_for_modules_of_megatron_alone() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match="parallel state isn't initialised"):
        WeightSource(model, config={})
    with pytest.raises(InvalidArgument, match="config is for a module of Megatron-Core"):
        WeightSource(dict(model.named_parameters()), config={})
    with pytest.raises(InvalidArgument, match="a list of modules needs a config"):
        WeightSource([model])
