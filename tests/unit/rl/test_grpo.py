"""The policy gradient of ``examples/rl``, and the samples that it learns from: no update learns
from samples that are older than agreed, and none are lost uncounted."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parents[3] / "examples/rl/task.py"

task = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
SampleBuffer, Samples = task.SampleBuffer, task.Samples
ROWS = 3


def test_a_sample_is_compared_with_the_others_of_its_prompt() -> None:
    found = task.advantages(torch.tensor([0.0, 1.0, 0.0, 1.0, 10.0, 30.0, 10.0, 30.0]), 4)
    expected = torch.tensor([-1.0, 1, -1, 1, -1, 1, -1, 1])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0])
    loss = task.objective(new, new.detach(), advantage, 0.2)
    (found,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(found, -advantage[:, None].expand(2, 2) / 4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True)],
)
def test_a_stale_sample_pulls_only_within_the_trusted_range(
    ratio: float, advantage: float, learns: bool
) -> None:
    new = torch.tensor([[ratio]]).log().requires_grad_()
    loss = task.objective(new, torch.zeros(1, 1), torch.tensor([advantage]), 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert (gradient.item() != 0) is learns


def batch(*versions: int) -> Any:
    """Of tokens by these versions."""
    drawn = torch.tensor(versions).expand(ROWS, -1)
    return Samples(torch.zeros(ROWS, 5), torch.zeros(drawn.shape), drawn, torch.zeros(ROWS))


def filled(*versions: int, batches: int, staleness: int) -> Any:
    buffer = SampleBuffer(batches, staleness)
    for version in versions:
        buffer.put(batch(version))
    return buffer


def test_first_in_first_out() -> None:
    buffer = filled(1, 2, 3, batches=3, staleness=2)
    assert [b.version for b in buffer.take(3)] == [1, 2, 3]
    assert buffer.discarded == 0
    assert buffer.take(3) is None


def test_what_is_too_old_is_discarded_wherever_it_stands() -> None:
    buffer = filled(2, 1, 3, batches=3, staleness=1)
    assert buffer.take(3) is None
    assert buffer.discarded == ROWS
    buffer.put(batch(3))
    assert [b.version for b in buffer.take(3)] == [2, 3, 3]


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    buffer = filled(batches=1, staleness=1)
    buffer.put(batch(1, 2, 3))
    assert buffer.take(3) is None
    buffer.put(batch(2, 2, 3))
    taken = buffer.take(3)
    assert taken is not None
    assert task.staleness(taken, 3) == {1: 2 * ROWS, 0: ROWS}


def test_a_fresh_batch_takes_the_place_of_the_oldest() -> None:
    buffer = filled(1, 1, 2, batches=2, staleness=1)
    assert buffer.discarded == ROWS
    assert [b.version for b in buffer.take(2)] == [1, 2]


def test_samples_of_two_versions_are_counted() -> None:
    assert batch(2, 2).crossed == 0
    assert batch(1, 2).crossed == ROWS


def update(reward: float, **fields: Any) -> Any:
    values = {"staleness": {0: 1, 1: 1}, "crossed": 0, "mismatch": 1e-6, **fields}
    return task.Update(version=2, reward=reward, seconds=1.0, push_seconds=0.1, **values)


@pytest.mark.parametrize(
    ("last", "fails"),
    [
        (update(0.4), None),
        (update(0.25), "reward_rose"),
        (update(0.4, mismatch=1e-3), "logprobs_agree"),
        (update(0.4, mismatch=math.nan), "logprobs_agree"),
        (update(0.4, staleness={2: 1}), "staleness_bounded"),
    ],
)
def test_one_fault_is_enough(last: Any, fails: str | None) -> None:
    found = task.checks([update(0.2)] * 3 + [last], 1)
    assert [name for name, holds in found.items() if not holds] == ([fails] if fails else [])


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_at_any_speeds_the_bound_holds_and_every_sample_is_accounted_for(
    staleness: int, seed: int
) -> None:
    draw = random.Random(seed)
    buffer = filled(batches=3, staleness=staleness)
    version, put, learned = 1, 0, 0
    for _ in range(500):
        choice = draw.random()
        if choice < 0.2:
            version += 1
        elif choice < 0.7:
            buffer.put(batch(max(1, version - draw.randrange(3)), version))
            put += ROWS
        elif (taken := buffer.take(version)) is not None:
            assert max(task.staleness(taken, version)) <= staleness
            learned += ROWS * len(taken)
    assert learned > 0
    assert 0 <= put - learned - buffer.discarded <= 3 * ROWS
