"""The policy gradient: what is sampled, compared, clipped and minimised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fabric_ray.demo.rl.policy import advantages, logprobs, objective, sample

VOCAB = 5


def logits(tokens: Tensor) -> Tensor:
    """Depends on all tokens so far."""
    return torch.nn.functional.one_hot(tokens, VOCAB).cumsum(1).float() * 0.7


def test_logprobs_are_those_that_samples_were_drawn_with() -> None:
    prompts = torch.randint(VOCAB, (6, 3), generator=torch.Generator().manual_seed(1))
    tokens, drawn = sample(logits, prompts, 4, generator=torch.Generator().manual_seed(2))
    assert tokens.shape == (6, 7)
    assert torch.equal(tokens[:, :3], prompts)
    torch.testing.assert_close(logprobs(logits, tokens, 4), drawn)


def test_tokens_are_drawn_as_often_as_the_policy_says() -> None:
    asked = torch.tensor([[0, 1, 1]]).expand(20_000, 3)
    tokens, _ = sample(logits, asked, 1, generator=torch.Generator().manual_seed(3))
    found = tokens[:, 3].bincount(minlength=VOCAB) / len(tokens)
    expected = logits(asked[:1])[0, -1].softmax(-1)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_a_sample_is_compared_with_the_others_of_its_prompt() -> None:
    found = advantages(torch.tensor([0.0, 1.0, 0.0, 1.0, 10.0, 30.0, 10.0, 30.0]), 4)
    expected = torch.tensor([-1.0, 1, -1, 1, -1, 1, -1, 1])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_group_of_equals_teaches_nothing() -> None:
    assert advantages(torch.full((8,), 0.75), 4).tolist() == [0.0] * 8


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
