"""What counts as verified, and how it is shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from fabric_ray.demo.actors import same_bits
from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl.outcome import Outcome, Update
from fabric_ray.errors import InvalidArgument

UPDATE = Update(
    step=1,
    version=2,
    reward=0.2,
    solved=0.0,
    staleness={0: 64, 1: 64},
    discarded=0,
    clipped=0.0,
    mismatch=1e-6,
    seconds=0.2,
    train_seconds=0.1,
    push_seconds=0.01,
    generating_in_training=0.9,
    generating_in_push=0.8,
)


def outcome(last: float = 0.5, wrong: tuple[str, ...] = (), **changes: Any) -> Outcome:
    update = msgspec.structs.replace
    late = update(UPDATE, reward=last, **changes)
    return Outcome(
        options=Options(steps=8),
        parameters=1,
        nbytes=1,
        updates=(*[UPDATE] * 6, late, late),
        wrong=wrong,
        example=("2 1", "1 2"),
        seconds=2.0,
        transport="shm",
        timeline="rl-timeline.png",
    )


def test_verified_if_all_holds() -> None:
    assert outcome().verified
    said = outcome().summary()
    assert said["verified"] is True
    assert said["reward"]["first_quarter"] == pytest.approx(0.2)
    assert said["reward"]["last_quarter"] == pytest.approx(0.5)
    assert said["staleness"] == {0: 512, 1: 512}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"last": 0.25}, "reward_rose"),
        ({"wrong": ("version 2, rollout 0: model.norm.weight",)}, "weights_equal"),
        ({"mismatch": 1e-3}, "logprobs_agree"),
        ({"mismatch": float("nan")}, "logprobs_agree"),
        ({"staleness": {2: 128}}, "staleness_bounded"),
    ],
)
def test_one_fault_is_enough(changes: dict[str, Any], check: str) -> None:
    found = outcome(**changes)
    assert not found.verified
    assert [name for name, holds in found.checks.items() if not holds] == [check]


def test_every_bit_of_a_tensor_is_compared() -> None:
    nan = torch.tensor([torch.nan, 0.0])
    assert same_bits(nan, nan.clone())
    for other in (torch.tensor([torch.nan, -0.0]), nan.view(2, 1), nan.view(torch.int32)):
        assert not same_bits(nan, other)


@pytest.mark.parametrize("wrong", [{"steps": 3}, {"staleness": -1}, {"group": 1}, {"rollouts": 0}])
def test_what_cannot_be_run_is_named(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidArgument, match=name):
        Options(**wrong).check()
