"""The ways to bring weights from trainers to rollouts, each as one call of the driver."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from benchmarks.push import actors
from benchmarks.push.memory import Temporary
from fabric_ray.bench.results import Family
from fabric_ray.models import ModelConfig
from fabric_ray.plan import side_from_param_meta
from fabric_ray.weights import WeightSync

MIB = 1 << 20
_BUCKET = 256 * MIB
_PATIENCE = 900.0
# The first may take what later ones take again, and must not hide a leak.
_PUSHES = 3


class Way(NamedTuple):
    """One way."""

    name: str
    family: Family
    what: str
    run: Callable[[], float]
    """Moves everything once; seconds."""
    wrong: Callable[[], list[str]]
    """Moves everything once, then compares every byte; what differs."""
    took: Callable[[], Temporary] | None = None
    """The memory of the trainer that took most of it, to move everything once."""


class World:
    """The actors.

    Args:
        config: the model.
        trainers: FSDP ranks.
        tp: ranks of an engine.
        engines: replicas.
        fp8: whether rollouts hold fp8.
        transport: of ours.
        watermark: bytes of temporary memory of ours.
        scratch: a folder in memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        trainers: int,
        tp: int,
        engines: int,
        fp8: bool,
        transport: str,
        watermark: int,
        scratch: Path,
    ) -> None:
        self.config, self.scratch = config, scratch
        trainer = ray.remote(num_cpus=0)(actors.Trainer)
        rollout = ray.remote(num_cpus=0)(actors.Rollout)
        self.trainers = [
            trainer.remote(rank, trainers, config, transport=transport, threads=1, seed=0)
            for rank in range(trainers)
        ]
        self.rollouts = [
            rollout.remote(rank, tp, engines, config, fp8=fp8, transport=transport)
            for rank in range(tp * engines)
        ]
        store = ray.get(self.trainers[0].serve.remote(), timeout=_PATIENCE)
        self.each(self.trainers, "load", store, None)
        self.each(self.trainers, "bound", watermark)
        formats = actors.fp8_formats(config) if fp8 else None
        self.sync = WeightSync(self.trainers, self.rollouts, formats=formats)
        self.each(self.trainers, "mark")
        self.connected = self.sync.connect()
        self._update = False
        # Before a trainer trains: a step takes much more.
        for _ in range(_PUSHES):
            self.sync.push()
        self._ours = self._most("took_to_push")

    def each(self, actors: list[Any], method: str, *args: Any) -> list[Any]:
        results: list[Any] = self.wait([getattr(one, method).remote(*args) for one in actors])
        return results

    def wait(self, refs: list[Any]) -> Any:
        return ray.get(refs, timeout=_PATIENCE)

    def train(self) -> None:
        """One step, so that the next version differs."""
        self.each(self.trainers, "train", 1)

    def close(self) -> None:
        for actor in (*self.rollouts, *self.trainers):
            ray.kill(actor)

    def ours(self, *, train: bool = True) -> Way:
        """``train``: whether what is compared was trained; gradients stay, as large as weights."""

        def wrong() -> list[str]:
            if train:
                self.train()
            self.sync.push()
            reference = self.scratch / "reference"
            self.each(self.trainers, "export", reference)
            found = self.each(self.rollouts, "wrong_push", reference)
            shutil.rmtree(reference)
            return self._names(found)

        def run() -> float:
            return self.sync.push().seconds

        what = "WeightSync.push, until all have committed"
        return Way("fabric-ray push", "ours", what, run, wrong, lambda: self._ours)

    def floor(self) -> Way:
        sent = dict.fromkeys(range(len(self.trainers)), 0)
        for link in self.sync.plan.links():
            sent[link.src] += link.nbytes

        def run() -> float:
            refs = [actor.floor.remote(sent[rank], 1) for rank, actor in enumerate(self.trainers)]
            return float(max(self.wait(refs)))

        return Way(
            "copy floor", "floor", "memmove of the same bytes by as many processes", run, list
        )

    def quantise_floor(self) -> Way:
        copied = self.floor().run
        metas = dict(enumerate(self.each(self.trainers, "meta")))
        self.each(self.trainers, "get_ready_to_quantise", side_from_param_meta(metas))

        def run() -> float:
            start = time.perf_counter()
            self.each(self.trainers, "quantise")
            return time.perf_counter() - start + copied()

        what = "every trainer quantises its shards by itself, then the copy floor of what is sent"
        return Way("quantise + copy", "floor", what, run, list)

    def broadcast(self, bucket: int = 0) -> Way:
        if not self._update:
            world = len(self.rollouts) + 1
            address = self.wait([self.trainers[0].serve_update.remote(world)])[0]
            joins = [one.join_update.remote(world, address) for one in self.rollouts]
            self.wait([self.trainers[0].join_update.remote(world, address), *joins])
            self._update = True

        names = self.wait([self.trainers[0].names.remote()])[0]

        def run() -> float:
            start = time.perf_counter()
            sends = [one.broadcast.remote(bucket) for one in self.trainers]
            self.wait([*sends, *(one.receive.remote(names, bucket) for one in self.rollouts)])
            return time.perf_counter() - start

        if bucket:
            name, what = "buckets, then load", f"buckets of {bucket // MIB} MiB, cut up at rollouts"
        else:
            name, what = "gloo broadcast", "tensor by tensor, cut up at rollouts"
        what = f"gathered by gloo, broadcast to all: {what}"
        return self._peer(name, what, "whole", run)

    def checkpoint(self) -> Way:
        path = self.scratch / "weights.safetensors"

        def run() -> float:
            start = time.perf_counter()
            self.each(self.trainers, "save", path)
            self.each(self.rollouts, "load_file", path)
            return time.perf_counter() - start

        what = "gathered by gloo, a safetensors file in memory, cut up at rollouts"
        return self._peer("checkpoint", what, "whole", run)

    def store(self) -> Way:
        routes = self.sync.plan.to_bytes()

        def run() -> float:
            start = time.perf_counter()
            shards = self.each(self.trainers, "put")
            self.each(self.rollouts, "take", routes, shards)
            return time.perf_counter() - start

        what = "shards put by trainers; rollouts get those they need and cut them up, by our plan"
        return self._peer("Ray object store", what, "shards", run)

    def _peer(self, name: str, what: str, memory: str, run: Callable[[], float]) -> Way:
        """Another way, which brings weights into ``memory`` of the rollouts."""

        def wrong() -> list[str]:
            run()
            return self._names(self.each(self.rollouts, "wrong", memory))

        def took() -> Temporary:
            self.each(self.trainers, "mark")
            run()
            return self._most("took")

        return Way(name, "peer", what, run, wrong, took)

    def _names(self, found: list[list[str]]) -> list[str]:
        return sorted({name for names in found for name in names})

    def _most(self, reading: str) -> Temporary:
        taken: list[Temporary] = self.each(self.trainers, reading)
        return max(taken, key=lambda one: one.peak)


def floor(world: World, *, fp8: bool) -> Way:
    """What no push is faster than."""
    return world.quantise_floor() if fp8 else world.floor()


PEERS: dict[str, Callable[[World], Way]] = {
    "store": World.store,
    "broadcast": World.broadcast,
    "buckets": partial(World.broadcast, bucket=_BUCKET),
    "checkpoint": World.checkpoint,
}
"""Other ways to bring weights over. Each takes gigabytes, so each has a world of its own."""
