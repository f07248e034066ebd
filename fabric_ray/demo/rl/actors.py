"""Trainers with FSDP2 shards of the policy, and rollouts that generate while weights arrive."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import ray
import torch
from torch import Tensor
from torch.func import functional_call

from fabric_ray.demo import actors
from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl import policy
from fabric_ray.demo.rl.outcome import model
from fabric_ray.demo.rl.policy import Samples
from fabric_ray.models import fsdp
from fabric_ray.models.tensor_parallel import full_parameters
from fabric_ray.models.transformer import Transformer

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""


def covered(interval: Interval, by: Iterable[Interval]) -> float:
    """The share of ``interval`` that lies within ``by``, whose parts don't overlap; 0 to 1."""
    start, end = interval
    if end <= start:
        return 0.0
    inside = sum(max(0.0, min(end, e) - max(start, s)) for s, e in by)
    return min(1.0, inside / (end - start))


class Trained(msgspec.Struct, frozen=True):
    """What an update was on one trainer."""

    clipped: float
    mismatch: float
    start: float
    """Seconds since the epoch."""
    end: float


class Trainer(actors.Trainer):
    """One rank."""

    # A model as narrow as this one hardly begins to learn from the usual 0.02.
    STD = 0.1

    def __init__(self, rank: int, options: Options) -> None:
        super().__init__(
            rank,
            options.trainers,
            model(),
            transport=options.transport,
            threads=1,
            seed=options.seed,
        )
        self._options = options
        with torch.device("meta"):
            self._whole = Transformer(self.config)
        # Whole weights of versions that samples may still come from, the oldest first.
        self._published: dict[int, dict[str, Tensor]] = {}

    def load(self, store: tuple[str, int], checkpoint: Path | None = None) -> None:
        super().load(store, checkpoint)
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self._options.lr, betas=(0.9, 0.95), foreach=False
        )

    def publish(self, version: int) -> dict[str, Tensor]:
        """Remembers the weights as ``version``; returns them."""
        whole = {name: tensor.clone() for name, tensor in fsdp.full_tensors(self.model)}
        self._published[version] = whole
        for old in [v for v in self._published if v < version - self._options.staleness]:
            del self._published[old]
        return whole

    def update(self, batches: Sequence[Samples]) -> Trained:
        """One update from this rank's samples; the other ranks must make theirs."""
        start = time.time()
        mismatch = max(map(self._mismatch, batches))
        tokens, old, rewards = (
            torch.cat([getattr(batch, field) for batch in batches])
            for field in ("tokens", "logprobs", "rewards")
        )
        advantage = policy.advantages(rewards, self._options.group)
        self._optimizer.zero_grad(set_to_none=True)
        new = policy.logprobs(self.model, tokens, self._options.digits)
        loss, clipped = policy.objective(new, old, advantage, self._options.clip)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self._optimizer.step()
        return Trained(clipped, mismatch, start, time.time())

    @torch.no_grad()
    def _mismatch(self, samples: Samples) -> float:
        """How far the rollout's log-probabilities are from those of the weights that were pushed
        to it."""
        weights = self._published[samples.version]
        logits = partial(functional_call, self._whole, weights)
        again = policy.logprobs(logits, samples.tokens, self._options.digits)
        return (again - samples.logprobs).abs().nan_to_num(nan=math.inf).max().item()


class Served(msgspec.Struct, frozen=True):
    """What a rollout says of itself after a push."""

    version: int
    wrong: tuple[str, ...]
    """Containers that differ from what a trainer holds."""
    generating: tuple[Interval, ...]
    """When it generated, since it was asked last."""


class Rollout(actors.Rollout):
    """One engine, as a Ray actor with a concurrency group ``draw``: the rest of it answers while
    that one draws.

    A batch is drawn inside ``reading()``, with one version. A push waits for it before it puts the
    next version into use.
    """

    def __init__(self, rank: int, options: Options) -> None:
        super().__init__(rank, 1, 1, model(), transport=options.transport, engines=options.rollouts)
        self._options = options
        with torch.device("meta"):
            self._whole = Transformer(self.config)
        self._random = torch.Generator().manual_seed(options.seed * 1000 + rank)
        self._lock = threading.Lock()
        self._draws = False
        self._began = 0.0
        self._generating: list[Interval] = []

    @ray.method(concurrency_group="draw")
    def draw(self) -> Samples:
        """A batch by the version that is in use as it begins."""
        with self.target.reading() as weights:
            with self._lock:
                self._draws, self._began = True, time.time()
            try:
                return self._sample(weights)
            finally:
                with self._lock:
                    self._note()
                    self._draws = False

    def served(self, *published: Mapping[str, Tensor]) -> Served:
        """The version that is in use now, compared with what each trainer published, and when this
        rollout generated."""
        with self._lock:
            if self._draws:
                self._note()
            intervals, self._generating = self._generating, []
        with self.target.reading() as weights:
            version = self.target.version
            assert version is not None, "asked for after a push"
            checked = [self._check(dict(weights), whole) for whole in published]
            wrong = tuple(name for found in checked for name in found.wrong)
            return Served(version, wrong, tuple(intervals))

    def _sample(self, weights: Mapping[str, Tensor]) -> Samples:
        options, version = self._options, self.target.version
        assert version is not None, "read"
        parameters = full_parameters(self.config, [weights])
        asked = policy.prompts(options.prompts, options.digits, generator=self._random)
        tokens, logprobs = policy.sample(
            partial(functional_call, self._whole, parameters),
            asked.repeat_interleave(options.group, dim=0),
            options.digits,
            generator=self._random,
        )
        return Samples(self.rank, version, tokens, logprobs, policy.rewards(tokens))

    def _note(self) -> None:
        """Generated from ``_began`` until now."""
        now = time.time()
        self._generating.append((self._began, now))
        self._began = now
