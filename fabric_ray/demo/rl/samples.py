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
    """First in, first out; rollouts begin only what can be used in time.

    A batch that begins now is drawn with the version that rollouts serve, and learned from when
    all that is ahead of it has been: that must be within ``staleness`` versions (AReaL, section
    5.1, bounds the same way). One that comes too late all the same, because its rollout is slow,
    is discarded and counted.

    Args:
        batches: that one update takes.
        staleness: versions that a sample may be behind the trainers.
    """

    def __init__(self, *, batches: int, staleness: int) -> None:
        self._batches, self._staleness = batches, staleness
        self._waiting: deque[Samples] = deque()
        self._begun = 0
        self._serving = self._next = 1
        self.discarded = 0
        """Samples, since the beginning."""

    def may_begin(self) -> bool:
        """Whether a batch that begins now can be learned from in time."""
        ahead = len(self._waiting) + self._begun
        return self._next + ahead // self._batches <= self._serving + self._staleness

    def begin(self) -> None:
        """A rollout begins a batch."""
        self._begun += 1

    def put(self, batch: Samples) -> None:
        """One that has begun is there."""
        self._begun -= 1
        self._waiting.append(batch)

    def serve(self, version: int) -> None:
        """All rollouts run ``version``."""
        self._serving = version

    def take(self, version: int) -> Taken | None:
        """What trainers at ``version`` learn from; ``None`` while there is too little."""
        oldest = version - self._staleness
        fresh = deque(batch for batch in self._waiting if batch.version >= oldest)
        self.discarded += sum(map(len, self._waiting)) - sum(map(len, fresh))
        self._waiting = fresh
        if len(fresh) < self._batches:
            return None
        self._next = version + 1
        batches = tuple(fresh.popleft() for _ in range(self._batches))
        staleness: Counter[int] = Counter()
        for batch in batches:
            staleness[version - batch.version] += len(batch)
        return Taken(batches, dict(sorted(staleness.items())))
