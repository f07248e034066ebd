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
from fabric_ray.errors import FabricError
from fabric_ray.models import tensor_parallel
from fabric_ray.weights import WeightTarget
from fabric_ray.weights.families import target_side

# A batch takes far less, even on a machine that is busy with other things.
_BATCH_S = 30.0


class Served(msgspec.Struct, frozen=True):
    """What a rollout says of itself after a push."""

    version: int
    fingerprints: Fingerprints
    generating: tuple[Interval, ...]
    """When it generated, since it was asked last."""


class _Serving(msgspec.Struct, frozen=True):
    version: int
    weights: Mapping[str, Tensor]


class Rollout:
    """One engine, as a Ray actor with a concurrency group ``draw``: the rest of it answers while
    that one draws.

    A batch is drawn with one version. One that is committed meanwhile serves the next batch, and
    its commit returns when nobody reads the version before: the push after that writes there.
    """

    def __init__(self, rank: int, options: Options) -> None:
        torch.set_num_threads(1)
        self._rank, self._options, self._config = rank, options, model()
        engine = runtime.engine(name=f"rl-rollout-{rank}", transport=options.transport)
        side = target_side(self._config, tp=1, ranks=range(options.rollouts))
        self.target = WeightTarget(side, rank=rank, engine=engine)
        self.target.on_commit(self._rebind)
        self._random = torch.Generator().manual_seed(options.seed * 1000 + rank)
        self._changed = threading.Condition()
        self._serving: _Serving | None = None
        self._reading: int | None = None
        self._began = 0.0
        self._generating: list[Interval] = []

    @ray.method(concurrency_group="draw")
    def draw(self) -> Samples:
        """A batch by the version that is in use as it begins."""
        serving = self._begin()
        try:
            return self._sample(serving)
        finally:
            with self._changed:
                self._note()
                self._reading = None
                self._changed.notify_all()

    def served(self) -> Served:
        """The version that is in use now, and when this rollout generated."""
        with self._changed:
            assert self._serving is not None, "asked for after a push"
            if self._reading is not None:
                self._note()
            intervals, self._generating = self._generating, []
            found = fingerprints(self._serving.weights.items())
            return Served(self._serving.version, found, tuple(intervals))

    def _rebind(self, version: int) -> None:
        """Runs within the commit."""
        with self._changed:
            self._serving = _Serving(version, dict(self.target.weights))
            if not self._changed.wait_for(lambda: self._reading in (None, version), _BATCH_S):
                raise FabricError(f"a batch of version {self._reading} has not ended yet")

    def _begin(self) -> _Serving:
        with self._changed:
            if self._serving is None:
                raise FabricError(f"rollout {self._rank} has no weights yet; push a version first")
            self._reading, self._began = self._serving.version, time.time()
            self._changed.notify_all()
            return self._serving

    def _sample(self, serving: _Serving) -> Samples:
        options = self._options
        asked = task.prompts(options.prompts, options.digits, generator=self._random)
        tokens, logprobs = policy.sample(
            lambda t: tensor_parallel.forward(self._config, [serving.weights], t),
            asked.repeat_interleave(options.group, dim=0),
            options.digits,
            generator=self._random,
        )
        return Samples(self._rank, serving.version, tokens, logprobs, task.rewards(tokens))

    def _note(self) -> None:
        """Generated from ``_began`` until now."""
        now = time.time()
        self._generating.append((self._began, now))
        self._began = now
