"""The reward is exact."""

from __future__ import annotations

import torch

from fabric_ray.demo.rl.policy import SEPARATOR, prompts, readable, rewards


def test_the_reward_is_the_share_of_right_places() -> None:
    asked = [3, 1, 4, 1, SEPARATOR]
    answers = [[1, 1, 3, 4], [1, 1, 4, 3], [3, 1, 4, 1], [SEPARATOR] * 4]
    tokens = torch.tensor([asked + answer for answer in answers])
    assert rewards(tokens).tolist() == [1.0, 0.5, 0.25, 0.0]


def test_prompts_are_digits_and_follow_the_seed() -> None:
    made = prompts(50, 6, generator=torch.Generator().manual_seed(0))
    assert made.shape == (50, 7)
    assert set(made[:, :6].flatten().tolist()) == set(range(10))
    assert set(made[:, 6].tolist()) == {SEPARATOR}
    assert torch.equal(made, prompts(50, 6, generator=torch.Generator().manual_seed(0)))


def test_a_row_can_be_read() -> None:
    assert readable(torch.tensor([3, 1, SEPARATOR, 1, SEPARATOR])) == ("3 1", "1 ·")
