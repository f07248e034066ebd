"""The task, the policy gradient, and the samples that it learns from: no update learns from samples
that are older than agreed, and none are lost uncounted."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fabric_ray.demo.rl.policy import (
    SampleBuffer,
    Samples,
    advantages,
    logprobs,
    objective,
    sample,
)

VOCAB = 5
ROWS = 3


def logits(tokens: Tensor) -> Tensor:
    """Depends on all tokens so far."""
    return torch.nn.functional.one_hot(tokens, VOCAB).cumsum(1).float() * 0.7


def test_logprobs_are_those_that_samples_were_drawn_with() -> None:
    asked = torch.randint(VOCAB, (6, 3), generator=torch.Generator().manual_seed(1))
    tokens, drawn = sample(logits, asked, 4, generator=torch.Generator().manual_seed(2))
    assert tokens.shape == (6, 7)
    assert torch.equal(tokens[:, :3], asked)
    torch.testing.assert_close(logprobs(logits, tokens, 4), drawn)


def test_a_sample_is_compared_with_the_others_of_its_prompt() -> None:
    found = advantages(torch.tensor([0.0, 1.0, 0.0, 1.0, 10.0, 30.0, 10.0, 30.0]), 4)
    expected = torch.tensor([-1.0, 1, -1, 1, -1, 1, -1, 1])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0])
    loss, clipped = objective(new, new.detach(), advantage, 0.2)
    (found,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(found, -advantage[:, None].expand(2, 2) / 4)
    assert clipped == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True)],
)
def test_a_stale_sample_pulls_only_within_the_trusted_range(
    ratio: float, advantage: float, learns: bool
) -> None:
    new = torch.tensor([[ratio]]).log().requires_grad_()
    loss, clipped = objective(new, torch.zeros(1, 1), torch.tensor([advantage]), 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert (gradient.item() != 0) is learns
    assert clipped == (0 if learns else 1)


def batch(version: int) -> Samples:
    return Samples(0, version, torch.zeros(ROWS, 5), torch.zeros(ROWS, 2), torch.zeros(ROWS))


def filled(*versions: int, batches: int, staleness: int) -> SampleBuffer:
    buffer = SampleBuffer(batches=batches, staleness=staleness)
    for version in versions:
        buffer.put(batch(version))
    return buffer


def test_first_in_first_out_and_counted_by_staleness() -> None:
    buffer = filled(1, 2, 3, batches=3, staleness=2)
    taken = buffer.take(3)
    assert taken is not None
    assert [b.version for b in taken.batches] == [1, 2, 3]
    assert taken.staleness == {0: ROWS, 1: ROWS, 2: ROWS}
    assert buffer.discarded == 0
    assert buffer.take(3) is None


def test_what_is_too_old_is_discarded_wherever_it_stands() -> None:
    buffer = filled(2, 1, 3, batches=3, staleness=1)
    assert buffer.take(3) is None
    assert buffer.discarded == ROWS
    buffer.put(batch(3))
    taken = buffer.take(3)
    assert taken is not None
    assert taken.staleness == {0: 2 * ROWS, 1: ROWS}


def test_a_fresh_batch_takes_the_place_of_the_oldest() -> None:
    buffer = filled(1, 1, 2, batches=2, staleness=1)
    assert buffer.discarded == ROWS
    taken = buffer.take(2)
    assert taken is not None
    assert [b.version for b in taken.batches] == [1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_at_any_speeds_the_bound_holds_and_every_sample_is_accounted_for(
    staleness: int, seed: int
) -> None:
    draw = random.Random(seed)
    buffer = SampleBuffer(batches=3, staleness=staleness)
    version, put, learned = 1, 0, 0
    for _ in range(500):
        choice = draw.random()
        if choice < 0.2:
            version += 1
        elif choice < 0.7:
            buffer.put(batch(max(1, version - draw.randrange(3))))
            put += ROWS
        elif (taken := buffer.take(version)) is not None:
            assert max(taken.staleness) <= staleness
            learned += sum(taken.staleness.values())
    assert learned > 0
    assert 0 <= put - learned - buffer.discarded <= 3 * ROWS
