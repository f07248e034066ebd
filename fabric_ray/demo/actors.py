"""Actors of the demos that push weights: trainers with FSDP2, tensor-parallel rollouts."""

from __future__ import annotations

import ctypes
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
import torch
import torch.distributed as dist

from fabric_ray import runtime
from fabric_ray.models import ModelConfig, fsdp
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.runtime.process import node_address
from fabric_ray.weights import WeightSource, WeightTarget
from fabric_ray.weights.families import target_side
from fabric_ray.weights.reference import iter_expected

TIMEOUT = 600.0
"""Seconds that a call of an actor may take."""
BATCH, HALF = 2, 8
# Far beyond any cache, so that every pass over so much finds its bytes cold.
_BLOCK = 256 << 20


class Checked(msgspec.Struct, frozen=True):
    """What a rollout found when it compared its weights with the reference."""

    nbytes: int
    """Bytes compared, padding among them."""
    wrong: tuple[str, ...]
    """Containers that differ, are missing or are too many."""
    changed: bool
    """Whether anything differs from the version before: training must have had an effect."""


class PlainCopy:
    """Memory and threads for plain copies.

    Args:
        threads: that share each copy.
        nbytes: of a copy; larger ones pass over the same memory again.
    """

    def __init__(self, threads: int, nbytes: int = _BLOCK) -> None:
        self._room = max(1, -(-min(nbytes, _BLOCK) // threads))
        self._src = np.ones(self._room * threads, dtype=np.uint8)
        self._dst = np.ones(self._room * threads, dtype=np.uint8)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def run(self, nbytes: int) -> float:
        """Seconds to copy ``nbytes``, evenly shared by the threads."""
        each = -(-nbytes // self._threads)
        start = time.perf_counter()
        list(self._pool.map(self._share, range(self._threads), [each] * self._threads))
        return time.perf_counter() - start

    def _share(self, thread: int, nbytes: int) -> None:
        at = thread * self._room
        while nbytes:
            n = min(nbytes, self._room)
            ctypes.memmove(self._dst.ctypes.data + at, self._src.ctypes.data + at, n)
            nbytes -= n


def spread(actor: type) -> Any:
    """The actor's class for Ray, which puts actors on all nodes; ``remote`` makes one."""
    # No CPUs are asked for: the demo has to fit on any machine. Ray's types lack some options.
    remote: Any = ray.remote
    return remote(num_cpus=0, scheduling_strategy="SPREAD")(actor)


@contextmanager
def started(
    trainers: Sequence[Any], rollouts: Sequence[Any], checkpoint: Path | None = None
) -> Iterator[None]:
    """Has trainers load their first weights, and ends all actors with the block."""
    try:
        store = ray.get(trainers[0].serve.remote(), timeout=TIMEOUT)
        loads = [trainer.load.remote(store, checkpoint) for trainer in trainers]
        ready = [rollout.__ray_ready__.remote() for rollout in rollouts]
        ray.get([*loads, *ready], timeout=TIMEOUT)
        yield
    finally:
        for actor in (*rollouts, *trainers):
            ray.kill(actor)


class Trainer:
    """One rank.

    Args:
        rank: 0 to ``world - 1``.
        world: number of trainers.
        config: the model.
        transport: of the engine.
        threads: copying threads of the engine.
        seed: of weights and data.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        config: ModelConfig,
        *,
        transport: str,
        threads: int,
        seed: int,
    ) -> None:
        torch.set_num_threads(threads)
        self.rank, self.world, self.config, self.threads = rank, world, config, threads
        runtime.engine(name=f"trainer-{rank}", transport=transport, copy_threads=threads)
        self._generator = torch.Generator().manual_seed(seed * 1000 + rank)
        self._seed = seed
        self._store: Any = None
        self._floor: PlainCopy | None = None

    def serve(self) -> tuple[str, int]:
        """Opens the store where trainers find each other; rank 0 only."""
        address = node_address()
        self._store = fsdp.serve_store(address, world=self.world)
        return address, self._store.port

    def load(self, store: tuple[str, int], checkpoint: Path | None = None) -> None:
        """Joins the others, and takes this rank's shards of the first weights."""
        address, port = store
        fsdp.join(rank=self.rank, world=self.world, address=address, port=port, store=self._store)
        first = InitialWeights(self.config, seed=self._seed, std=0.02)
        source = Checkpoint(checkpoint) if checkpoint else first
        self.model = fsdp.sharded_model(self.config, fsdp.make_mesh(), source)
        self._optimizer = fsdp.make_optimizer(self.model)
        self.source = WeightSource(self.model, rank=self.rank)

    def train(self, steps: int) -> list[float]:
        """Trains; returns the loss of each step, averaged over the trainers."""
        losses = []
        for _ in range(steps):
            batch = fsdp.copy_task(
                self.config.vocab, batch=BATCH, half=HALF, generator=self._generator
            )
            step = fsdp.train_step(self.model, self._optimizer, batch)
            loss = torch.tensor(step, dtype=torch.float32, device="cpu")
            dist.all_reduce(loss)
            losses.append(loss.item() / self.world)
        return losses

    def export(self, directory: Path) -> None:
        """Writes the reference: whole tensors, put together by torch, in a checkpoint."""
        tensors = fsdp.full_tensors(self.model)
        if self.rank == 0:
            save_checkpoint(directory, self.config, tensors)
        else:
            for _ in tensors:
                pass

    def floor(self, nbytes: int, repeats: int) -> float:
        """Median seconds of a plain copy of ``nbytes``, while the other trainers copy theirs."""
        if self._floor is None:
            self._floor = PlainCopy(self.threads, nbytes)
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            seconds.append(self._floor.run(nbytes))
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(statistics.median(slowest.tolist()))


class Rollout:
    """One rank.

    Args:
        rank: 0 to ``tp - 1``.
        tp: ranks of an engine.
        ep: groups of them that own whole experts.
        config: the model.
        transport: of the engine.
        staged: see :class:`fabric_ray.weights.WeightTarget`.
    """

    def __init__(
        self,
        rank: int,
        tp: int,
        ep: int,
        config: ModelConfig,
        *,
        transport: str,
        staged: bool = True,
    ) -> None:
        torch.set_num_threads(1)
        self.rank, self.tp, self.ep, self.config = rank, tp, ep, config
        engine = runtime.engine(name=f"rollout-{rank}", transport=transport)
        side = target_side(config, tp=tp, ep=ep, ranks=range(tp))
        self.target = WeightTarget(side, rank=rank, engine=engine, staged=staged)
        self._seen: int | None = None

    def check(self, reference: Path) -> Checked:
        """Compares every byte with the directory of a checkpoint of the trainers' whole tensors."""
        with self.target.reading() as weights:
            return self._check(dict(weights), Checkpoint(reference))

    def _check(self, held: dict[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> Checked:
        nbytes, checksum = 0, 0
        wrong = []
        expected = iter_expected(self.config, whole, tp=self.tp, ep=self.ep, rank=self.rank)
        for name, tensor in expected:
            found = held.pop(name, None)
            if found is None or not same_bits(found, tensor):
                wrong.append(name)
                continue
            nbytes += found.nbytes
            checksum = zlib.crc32(_bytes(found).numpy().data, checksum)
        changed, self._seen = checksum != self._seen, checksum
        return Checked(nbytes, (*wrong, *held), changed)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, so that a NaN equals itself and zeros of either sign differ.
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are the same."""
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and torch.equal(_bytes(found), _bytes(expected))
    )
