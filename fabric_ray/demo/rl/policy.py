"""The task, and the policy gradient that learns it: rewards, sampling, samples on their way to
trainers, advantages and the clipped objective.

The task is to sort digits. What is right can be computed, so the reward is exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""From token ids ``[batch, positions]`` to logits ``[batch, positions, vocab]``."""

DIGITS = 10
SEPARATOR = DIGITS
"""Ends the prompt; the answer follows."""
VOCAB = DIGITS + 1


def prompts(number: int, length: int, *, generator: torch.Generator) -> Tensor:
    """Random digits and the separator: ``[number, length + 1]``, int64."""
    digits = torch.randint(
        DIGITS, (number, length), generator=generator, dtype=torch.int64, device="cpu"
    )
    separators = torch.full((number, 1), SEPARATOR, dtype=torch.int64, device="cpu")
    return torch.cat([digits, separators], dim=1)


def rewards(tokens: Tensor) -> Tensor:
    """The share of places that hold the right digit.

    Args:
        tokens: prompts with their answers, ``[batch, 2 * length + 1]``.

    Returns:
        ``[batch]``, float32, from 0 to 1.
    """
    length = tokens.shape[1] // 2
    right = tokens[:, :length].sort(dim=1).values
    return (tokens[:, length + 1 :] == right).float().mean(dim=1)


def readable(tokens: Tensor) -> tuple[str, str]:
    """A prompt and its answer, of one row of tokens."""
    length = len(tokens) // 2
    shown = ["·" if token == SEPARATOR else str(token) for token in tokens.tolist()]
    return " ".join(shown[:length]), " ".join(shown[length + 1 :])


class Samples(msgspec.Struct, frozen=True):
    """A batch that one rollout drew with one version of the weights."""

    rollout: int
    version: int
    tokens: Tensor
    """Prompts with their answers, ``[batch, positions]``; a prompt's samples are neighbours."""
    logprobs: Tensor
    """Of the answers' tokens, as the rollout drew them: ``[batch, answer]``."""
    rewards: Tensor
    """``[batch]``."""

    def __len__(self) -> int:
        return len(self.rewards)


class Taken(msgspec.Struct, frozen=True):
    """What one update learns from."""

    batches: tuple[Samples, ...]
    staleness: dict[int, int]
    """Samples by how many versions the trainers are ahead of them."""


class SampleBuffer:
    """First in, first out, and never more than one update takes: rollouts don't wait for trainers,
    so a fresh batch takes the place of the oldest. What is too old when it would be learned from is
    discarded, too.

    Args:
        batches: that one update takes.
        staleness: versions that a sample may be behind the trainers.
    """

    def __init__(self, *, batches: int, staleness: int) -> None:
        self._batches, self._staleness = batches, staleness
        self._waiting: deque[Samples] = deque()
        self.discarded = 0
        """Samples, since the beginning."""

    def put(self, batch: Samples) -> None:
        if len(self._waiting) == self._batches:
            self.discarded += len(self._waiting.popleft())
        self._waiting.append(batch)

    def take(self, version: int) -> Taken | None:
        """What trainers at ``version`` learn from; ``None`` while there is too little."""
        oldest = version - self._staleness
        fresh = deque(batch for batch in self._waiting if batch.version >= oldest)
        self.discarded += sum(map(len, self._waiting)) - sum(map(len, fresh))
        self._waiting = fresh
        if len(fresh) < self._batches:
            return None
        self._waiting = deque()
        staleness: Counter[int] = Counter()
        for batch in fresh:
            staleness[version - batch.version] += len(batch)
        return Taken(tuple(fresh), dict(sorted(staleness.items())))


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
