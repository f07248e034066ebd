"""A trainer of the demo: holds FSDP2 shards of a model, and really trains them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fabric_ray import runtime
from fabric_ray.demo.floor import PlainCopy
from fabric_ray.models import ModelConfig, fsdp
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.runtime.process import node_address
from fabric_ray.weights import WeightSource

BATCH, HALF = 2, 8


class Trainer:
    """One rank; make it with ``ray.remote(Trainer).remote(...)``.

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
        self._engine = runtime.engine(
            name=f"demo-trainer-{rank}", transport=transport, copy_threads=threads
        )
        self._generator = torch.Generator().manual_seed(seed * 1000 + rank)
        self._seed = seed
        self._store: Any = None
        self._floor: PlainCopy | None = None

    def serve(self) -> tuple[str, int]:
        """Opens the store where trainers find each other; rank 0 only."""
        address = node_address()
        self._store = fsdp.serve_store(address, world=self.world)
        return address, self._store.port

    def load(self, store: tuple[str, int], checkpoint: Path | None) -> int:
        """Joins the others, takes this rank's shards of the weights; returns their bytes."""
        address, port = store
        fsdp.join(rank=self.rank, world=self.world, address=address, port=port, store=self._store)
        source = (
            Checkpoint(checkpoint) if checkpoint else InitialWeights(self.config, seed=self._seed)
        )
        self.model = fsdp.sharded_model(self.config, fsdp.make_mesh(), source)
        self._optimizer = fsdp.make_optimizer(self.model)
        self.source = WeightSource(self.model, rank=self.rank)
        return sum(p.to_local().nbytes for p in self.model.parameters())  # type: ignore[attr-defined]

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
            self._floor = PlainCopy(self.threads)
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            seconds.append(self._floor.run(nbytes))
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(statistics.median(slowest.tolist()))

    def close(self) -> None:
        self.source.close()
        fsdp.leave()
        runtime.shutdown()
