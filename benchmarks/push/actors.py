"""Trainers and rollouts that can move weights as each contender does."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.push.loading import DTYPE, Loader, routes_of_whole
from benchmarks.push.memory import Mark, Temporary
from fabric_ray import runtime
from fabric_ray.demo import actors as demo
from fabric_ray.models import ModelConfig, fsdp, parameter_shapes
from fabric_ray.models.checkpoint import Checkpoint
from fabric_ray.plan import ParamMeta, Plan, Side
from fabric_ray.runtime.process import node_address
from fabric_ray.weights import WeightSource, WeightTarget
from fabric_ray.weights.families import target_side
from fabric_ray.weights.quant import (
    Formats,
    Fp8,
    RankQuantiser,
    linear_formats,
    quantised_target,
)
from fabric_ray.weights.reference import iter_expected

_PATIENCE = timedelta(seconds=600)


class _Update:
    """The group in which one trainer broadcasts to all rollouts."""

    def __init__(self, rank: int, world: int, address: tuple[str, int], store: Any = None) -> None:
        host, port = address
        self._store = store or dist.TCPStore(
            host, port, world, is_master=False, wait_for_workers=False, timeout=_PATIENCE
        )
        self._group = dist.ProcessGroupGloo(self._store, rank, world, _PATIENCE)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


class Trainer(demo.Trainer):
    """A trainer of the demo, and what else it might do with its weights."""

    def bound(self, watermark: int) -> None:
        """Makes tensors ready in so many bytes."""
        self.source.close()
        self.source = WeightSource(self.model, rank=self.rank, watermark=watermark)

    def mark(self) -> None:
        """From here on memory counts."""
        self._mark = Mark()

    def took(self) -> Temporary:
        """The most memory of this process since :meth:`mark`."""
        return Temporary(self._mark.peak()[0])

    def took_to_push(self) -> Temporary:
        """The same, and what of it is the memory that the watermark bounds."""
        ring = self.source.temporary
        peak, resident = self._mark.peak(None if ring is None else ring.addr)
        return Temporary(peak, resident, self.source.watermark)

    def serve_update(self, world: int) -> tuple[str, int]:
        """Opens the store of the update group; rank 0 only."""
        host = node_address()
        self._update_store = dist.TCPStore(
            host, 0, world, is_master=True, wait_for_workers=False, timeout=_PATIENCE
        )
        return host, self._update_store.port

    def join_update(self, world: int, address: tuple[str, int]) -> None:
        self._update = _Update(0, world, address, self._update_store)

    def names(self) -> list[str]:
        """Of the model's parameters, in its order."""
        return [name for name, _ in self.model.named_parameters()]

    def broadcast(self, bucket: int) -> None:
        """Gathers tensor by tensor from all trainers; rank 0 broadcasts them, ``bucket`` bytes at a
        time (0: each by itself)."""
        buckets = iter(_buckets(self.config, self.names(), bucket))
        flat, at, names = torch.empty(0), 0, 0
        for _, full in fsdp.full_tensors(self.model):
            if self.rank:
                continue
            if not names:
                nbytes, members = next(buckets)
                flat, at, names = torch.empty(nbytes // 2, dtype=DTYPE), 0, len(members)
            flat[at : at + full.numel()].copy_(full.reshape(-1))
            at, names = at + full.numel(), names - 1
            if not names:
                self._update.broadcast(flat)

    def save(self, path: Path) -> None:
        """Gathers tensor by tensor from all trainers; rank 0 writes a checkpoint."""
        whole = {name: full for name, full in fsdp.full_tensors(self.model) if not self.rank}
        if not self.rank:
            save_file(whole, path)

    def put(self) -> dict[str, Any]:
        """This rank's shards in Ray's object store."""
        return {name: ray.put(_shard(p).numpy()) for name, p in self.model.named_parameters()}

    def meta(self) -> list[ParamMeta]:
        """What this rank holds."""
        _, reports, _ = self.source.meta()
        assert not isinstance(reports, bytes), "no side was given"
        return reports

    def get_ready_to_quantise(self, side: Side) -> None:
        self._quantiser = RankQuantiser(side, fp8_formats(self.config), self.rank)
        nbytes = max(p.nbytes for p in self._quantiser.preparations.values())
        self._values = torch.empty(nbytes, dtype=torch.uint8)
        self._values.zero_()

    def quantise(self) -> None:
        """Makes fp8 of this rank's shards, one by one in the same memory; sends nothing."""
        shards = {n: _local(p) for n, p in self.model.named_parameters()}
        maxima = self._quantiser.partial_maxima(shards)
        for name, preparation in self._quantiser.preparations.items():
            count = _count(preparation.shape)
            values = self._values[:count].view(preparation.values_dtype).view(preparation.shape)
            scales = torch.empty(preparation.scale_shape, dtype=preparation.scale_dtype)
            preparation.prepare(shards[name], values, scales, maxima)


class Rollout:
    """One rank of an engine, of several engines."""

    def __init__(
        self, rank: int, tp: int, engines: int, config: ModelConfig, *, fp8: bool, transport: str
    ) -> None:
        torch.set_num_threads(1)
        self.rank, self.tp, self.config = rank, tp, config
        engine = runtime.engine(name=f"rollout-{rank}", transport=transport)
        self._side = side = target_side(config, tp=tp, ranks=range(tp * engines))
        if fp8:
            side = quantised_target(side, fp8_formats(config))
        # In place, as with all peers here.
        self.target = WeightTarget(side, rank=rank, engine=engine, staged=False)
        self._loaders: dict[str, Loader] = {}

    def join_update(self, world: int, address: tuple[str, int]) -> None:
        self._update = _Update(self.rank + 1, world, address)

    def receive(self, names: list[str], bucket: int) -> None:
        """The other end of :meth:`Trainer.broadcast`: loads what belongs here from each bucket."""
        shapes = parameter_shapes(self.config)
        for nbytes, members in _buckets(self.config, names, bucket):
            flat = torch.empty(nbytes // 2, dtype=DTYPE)
            self._update.broadcast(flat)
            at = 0
            for name in members:
                count = _count(shapes[name])
                self._whole().load(name, flat[at : at + count])
                at += count

    def load_file(self, path: Path) -> None:
        """The other end of :meth:`Trainer.save`."""
        with safe_open(path, framework="pt") as whole:
            for name in whole.keys():  # noqa: SIM118  (it has no iterator)
                self._whole().load(name, whole.get_tensor(name))

    def take(self, routes: bytes, shards: list[dict[str, Any]]) -> None:
        """The other end of :meth:`Trainer.put`: only the shards of which parts belong here."""
        if "shards" not in self._loaders:
            self._loaders["shards"] = Loader(Plan.from_bytes(routes), self.rank)
        loader = self._loaders["shards"]
        wanted = loader.wanted()
        for (holder, name), shard in zip(
            wanted, ray.get([shards[holder][name] for holder, name in wanted]), strict=True
        ):
            loader.load(name, torch.from_numpy(shard).view(DTYPE), holder=holder)

    def wrong(self, memory: str) -> list[str]:
        """Containers of that memory with other bytes than a push of ours; forgets them."""
        loader = self._loaders.pop(memory)
        with self.target.reading() as weights:
            return loader.differs(weights)

    def wrong_push(self, reference: Path) -> list[str]:
        """Containers in which a push of ours differs from a checkpoint of the trainers' tensors."""
        whole = Checkpoint(reference)
        expected = iter_expected(self.config, whole, tp=self.tp, rank=self.rank % self.tp)
        with self.target.reading() as held:
            return [name for name, tensor in expected if not torch.equal(held[name], tensor)]

    def _whole(self) -> Loader:
        if "whole" not in self._loaders:
            self._loaders["whole"] = Loader(routes_of_whole(self.config, self._side), self.rank)
        return self._loaders["whole"]


def fp8_formats(config: ModelConfig) -> Formats:
    """As DeepSeek-V3 does it."""
    return linear_formats(config.kind, Fp8((128, 128)))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.detach()


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    # numpy knows no bfloat16.
    return _local(parameter).contiguous().view(torch.int16)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _buckets(config: ModelConfig, names: list[str], limit: int) -> list[tuple[int, list[str]]]:
    """Bytes and tensors of each bucket, in the order of names."""
    out: list[tuple[int, list[str]]] = []
    shapes = parameter_shapes(config)
    for name in names:
        nbytes = DTYPE.itemsize * _count(shapes[name])
        if not out or out[-1][0] + nbytes > limit:
            out.append((0, []))
        out[-1] = out[-1][0] + nbytes, [*out[-1][1], name]
    return out
