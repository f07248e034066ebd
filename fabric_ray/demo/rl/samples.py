"""Samples on their way from rollouts to trainers, none of them older than agreed."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import torch


class Samples(msgspec.Struct, frozen=True):
    """A batch that one rollout drew with one version of the weights."""

    rollout: int
    version: int
    tokens: torch.Tensor
    """Prompts with their answers, ``[batch, positions]``; a prompt's samples are neighbours."""
    logprobs: torch.Tensor
    """Of the answers' tokens, as the rollout drew them: ``[batch, answer]``."""
    rewards: torch.Tensor
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
