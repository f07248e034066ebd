"""The policy gradient: sampling, log-probabilities, advantages and the clipped objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""From token ids ``[batch, positions]`` to logits ``[batch, positions, vocab]``."""


class Objective(NamedTuple):
    """What one update minimises, and how much of it was held back."""

    loss: Tensor
    clipped: float
    """Share of tokens whose ratio left the trusted range in the direction of their advantage."""


@torch.no_grad()
def sample(
    logits: Logits, prompts: Tensor, length: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Continues each prompt by ``length`` tokens drawn at temperature 1.

    Returns:
        The prompts with their continuations, and the log-probability of each drawn token,
        ``[batch, length]``.
    """
    tokens, drawn = prompts, []
    for _ in range(length):
        logp = logits(tokens)[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        drawn.append(logp.gather(-1, token))
        tokens = torch.cat([tokens, token], dim=1)
    return tokens, torch.cat(drawn, dim=1)


def logprobs(logits: Logits, tokens: Tensor, length: int) -> Tensor:
    """Log-probabilities of the last ``length`` tokens of each row, ``[batch, length]``."""
    logp = logits(tokens[:, :-1])[:, -length:].float().log_softmax(-1)
    return logp.gather(-1, tokens[:, -length:, None]).squeeze(-1)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better each sample is than the others of its prompt (GRPO, DeepSeekMath, section
    4.1.2): its distance from the group's mean, in standard deviations.

    Args:
        rewards: ``[batch]``; samples of one prompt are neighbours.
        group: samples of each prompt.

    Returns:
        ``[batch]``; 0 throughout a group whose rewards are all alike.
    """
    by_prompt = rewards.view(-1, group)
    centred = by_prompt - by_prompt.mean(dim=1, keepdim=True)
    spread = by_prompt.std(dim=1, keepdim=True, correction=0)
    return (centred / (spread + 1e-4)).flatten()


def objective(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Objective:
    """The clipped surrogate of PPO (section 3): samples of an older version are weighed by how
    likely the policy makes them now, within ``1 - clip`` to ``1 + clip``.

    Args:
        new: log-probabilities ``[batch, length]`` by the policy that learns.
        old: by the version that drew the tokens.
        advantage: ``[batch]``.
        clip: how far the ratio of the two may be trusted.
    """
    ratio = (new - old).exp()
    held = ratio.clamp(1 - clip, 1 + clip)
    free, bounded = ratio * advantage[:, None], held * advantage[:, None]
    clipped = (bounded < free).float().mean().item()
    return Objective(-torch.minimum(free, bounded).mean(), clipped)
