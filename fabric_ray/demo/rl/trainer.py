"""A trainer: FSDP2 shards of the policy, updated by policy gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.func import functional_call

from fabric_ray import runtime
from fabric_ray.demo.rl import policy
from fabric_ray.demo.rl.identity import Fingerprints, fingerprints
from fabric_ray.demo.rl.options import Options, model
from fabric_ray.demo.rl.samples import Samples
from fabric_ray.models import fsdp
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.transformer import Transformer
from fabric_ray.runtime.process import node_address
from fabric_ray.weights import WeightSource
from fabric_ray.weights.reference import iter_expected

# A model as narrow as this one hardly begins to learn from the usual 0.02.
_STD = 0.1


class Trained(msgspec.Struct, frozen=True):
    """What an update was on one trainer."""

    clipped: float
    mismatch: float
    start: float
    """Seconds since the epoch."""
    end: float


class Trainer:
    """One rank; make it with ``ray.remote(Trainer).remote(...)``."""

    def __init__(self, rank: int, options: Options) -> None:
        torch.set_num_threads(1)
        self._rank, self._options, self._config = rank, options, model()
        runtime.engine(name=f"rl-trainer-{rank}", transport=options.transport, copy_threads=1)
        self._store: Any = None
        with torch.device("meta"):
            self._whole = Transformer(self._config)
        # Whole weights of versions that samples may still come from, the oldest first.
        self._published: dict[int, dict[str, Tensor]] = {}

    def serve(self) -> tuple[str, int]:
        """Opens the store where trainers find each other; rank 0 only."""
        address = node_address()
        self._store = fsdp.serve_store(address, world=self._options.trainers)
        return address, self._store.port

    def load(self, store: tuple[str, int]) -> None:
        """Joins the others and takes this rank's shards of the first weights."""
        (address, port), options = store, self._options
        fsdp.join(
            rank=self._rank, world=options.trainers, address=address, port=port, store=self._store
        )
        first = InitialWeights(self._config, seed=options.seed, std=_STD)
        self._model = fsdp.sharded_model(self._config, fsdp.make_mesh(), first)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=options.lr, betas=(0.9, 0.95), foreach=False
        )
        self.source = WeightSource(self._model, rank=self._rank)

    def publish(self, version: int) -> Fingerprints:
        """Remembers the weights as ``version``; returns what each rollout must hold of them."""
        whole = {name: tensor.clone() for name, tensor in fsdp.full_tensors(self._model)}
        self._published[version] = whole
        for old in [v for v in self._published if v < version - self._options.staleness]:
            del self._published[old]
        return fingerprints(iter_expected(self._config, whole, tp=1, rank=0))

    def train(self, batches: Sequence[Samples]) -> Trained:
        """One update from this rank's samples; the other ranks must make theirs."""
        start = time.time()
        mismatch = max(map(self._mismatch, batches))
        tokens, old, rewards = (
            torch.cat([getattr(batch, field) for batch in batches])
            for field in ("tokens", "logprobs", "rewards")
        )
        advantage = policy.advantages(rewards, self._options.group)
        self._optimizer.zero_grad(set_to_none=True)
        new = policy.logprobs(self._model, tokens, self._options.digits)
        loss, clipped = policy.objective(new, old, advantage, self._options.clip)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=False)
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
