"""A rollout: an inference engine of its own that generates while weights arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import msgspec
import ray
import torch
from torch import Tensor

from fabric_ray import runtime
from fabric_ray.demo.rl import policy, task
from fabric_ray.demo.rl.identity import Fingerprints, fingerprints
from fabric_ray.demo.rl.options import Options, model
from fabric_ray.demo.rl.overlap import Interval
from fabric_ray.demo.rl.samples import Samples
from fabric_ray.models import tensor_parallel
from fabric_ray.weights import WeightTarget
from fabric_ray.weights.families import target_side


class Served(msgspec.Struct, frozen=True):
    """What a rollout says of itself after a push."""

    version: int
    fingerprints: Fingerprints
    generating: tuple[Interval, ...]
    """When it generated, since it was asked last."""


class Rollout:
    """One engine, as a Ray actor with a concurrency group ``draw``: the rest of it answers while
    that one draws.

    A batch is drawn inside ``reading()``, with one version. A push waits for it before it puts the
    next version into use.
    """

    def __init__(self, rank: int, options: Options) -> None:
        torch.set_num_threads(1)
        self._rank, self._options, self._config = rank, options, model()
        engine = runtime.engine(name=f"rl-rollout-{rank}", transport=options.transport)
        side = target_side(self._config, tp=1, ranks=range(options.rollouts))
        self.target = WeightTarget(side, rank=rank, engine=engine)
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

    def served(self) -> Served:
        """The version that is in use now, and when this rollout generated."""
        with self._lock:
            if self._draws:
                self._note()
            intervals, self._generating = self._generating, []
        with self.target.reading() as weights:
            version = self.target.version
            assert version is not None, "asked for after a push"
            return Served(version, fingerprints(weights.items()), tuple(intervals))

    def _sample(self, weights: Mapping[str, Tensor]) -> Samples:
        options, version = self._options, self.target.version
        assert version is not None, "read"
        weights = dict(weights)
        asked = task.prompts(options.prompts, options.digits, generator=self._random)
        tokens, logprobs = policy.sample(
            lambda t: tensor_parallel.forward(self._config, [weights], t),
            asked.repeat_interleave(options.group, dim=0),
            options.digits,
            generator=self._random,
        )
        return Samples(self._rank, version, tokens, logprobs, task.rewards(tokens))

    def _note(self) -> None:
        """Generated from ``_began`` until now."""
        now = time.time()
        self._generating.append((self._began, now))
        self._began = now
