"""What brings weights from trainers to rollouts, each as one call of the driver."""

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
_PATIENCE = 900.0
# The first may take what later ones take again, and must not hide a leak.
_PUSHES = 3


class Contender(NamedTuple):
    name: str
    family: Family
    what: str
    move: Callable[[], object]
    """Moves everything once; a number that it returns is the seconds that count."""
    wrong: Callable[[], list[str]] = list
    """Moves everything once, then compares every byte; what differs."""
    took: Callable[[], Temporary | None] = lambda: None
    """The memory of the trainer that took most of it, to move everything once."""

    def run(self) -> list[float]:
        """Seconds, in a list of one."""
        start = time.perf_counter()
        found = self.move()
        return [found if isinstance(found, float) else time.perf_counter() - start]


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
        self.config, self.scratch, self._fp8 = config, scratch, fp8
        trainer, rollout = (ray.remote(num_cpus=0)(c) for c in (actors.Trainer, actors.Rollout))
        self.trainers = [
            trainer.remote(rank, trainers, config, transport=transport, threads=1, seed=0)
            for rank in range(trainers)
        ]
        self.rollouts = [
            rollout.remote(rank, tp, engines, config, fp8=fp8, transport=transport)
            for rank in range(tp * engines)
        ]
        store = ray.get(self.trainers[0].serve.remote(), timeout=_PATIENCE)
        self._all_trainers("load", store, None)
        self._all_trainers("bound", watermark)
        formats = actors.fp8_formats(config) if fp8 else None
        self.sync = WeightSync(self.trainers, self.rollouts, formats=formats)
        self._all_trainers("mark")
        self.connected = self.sync.connect()
        # Before a trainer trains: a step takes much more.
        for _ in range(_PUSHES):
            self.sync.push()
        self._ours = self._most("took_to_push")

    def close(self) -> None:
        for actor in (*self.rollouts, *self.trainers):
            ray.kill(actor)

    def ours(self, *, train: bool = True) -> Contender:
        """``train``: whether what is compared was trained; gradients stay, as large as weights."""

        def wrong() -> list[str]:
            if train:
                self._all_trainers("train", 1)
            self.sync.push()
            reference = self.scratch / "reference"
            self._all_trainers("export", reference)
            found = self._all_rollouts("wrong_push", reference)
            shutil.rmtree(reference)
            return _names(found)

        what = "WeightSync.push, until all have committed"
        push = lambda: self.sync.push().seconds  # noqa: E731
        return Contender("fabric-ray push", "ours", what, push, wrong, lambda: self._ours)

    def floor(self) -> Contender:
        """What no push is faster than."""
        sent = dict.fromkeys(range(len(self.trainers)), 0)
        for link in self.sync.plan.links():
            sent[link.src] += link.nbytes

        def copy() -> float:
            refs = [actor.floor.remote(sent[rank], 1) for rank, actor in enumerate(self.trainers)]
            return float(max(_wait(refs)))

        if not self._fp8:
            what = "memmove of the same bytes by as many processes"
            return Contender("copy floor", "floor", what, copy)
        metas = dict(enumerate(self._all_trainers("meta")))
        self._all_trainers("get_ready_to_quantise", side_from_param_meta(metas))

        def quantise() -> float:
            start = time.perf_counter()
            self._all_trainers("quantise")
            return time.perf_counter() - start + copy()

        what = "every trainer quantises its shards by itself, then the copy floor of what is sent"
        return Contender("quantise + copy", "floor", what, quantise)

    def broadcast(self, bucket: int = 0) -> Contender:
        world = len(self.rollouts) + 1
        address = _wait(self.trainers[0].serve_update.remote(world))
        joins = [one.join_update.remote(world, address) for one in self.rollouts]
        _wait([self.trainers[0].join_update.remote(world, address), *joins])
        names = _wait(self.trainers[0].names.remote())

        def move() -> None:
            sends = [one.broadcast.remote(bucket) for one in self.trainers]
            _wait([*sends, *(one.receive.remote(names, bucket) for one in self.rollouts)])

        if bucket:
            name, what = "buckets, then load", f"buckets of {bucket // MIB} MiB, cut up at rollouts"
        else:
            name, what = "gloo broadcast", "tensor by tensor, cut up at rollouts"
        return self._peer(name, f"gathered by gloo, broadcast to all: {what}", "whole", move)

    def checkpoint(self) -> Contender:
        path = self.scratch / "weights.safetensors"

        def move() -> None:
            self._all_trainers("save", path)
            self._all_rollouts("load_file", path)

        what = "gathered by gloo, a safetensors file in memory, cut up at rollouts"
        return self._peer("checkpoint", what, "whole", move)

    def store(self) -> Contender:
        routes = self.sync.plan.to_bytes()

        def move() -> None:
            self._all_rollouts("take", routes, self._all_trainers("put"))

        what = "shards put by trainers; rollouts get those they need and cut them up, by our plan"
        return self._peer("Ray object store", what, "shards", move)

    def _peer(self, name: str, what: str, memory: str, move: Callable[[], None]) -> Contender:
        """Brings weights into ``memory`` of the rollouts."""

        def wrong() -> list[str]:
            move()
            return _names(self._all_rollouts("wrong", memory))

        def took() -> Temporary:
            self._all_trainers("mark")
            move()
            return self._most("took")

        return Contender(name, "peer", what, move, wrong, took)

    def _all_trainers(self, method: str, *args: Any) -> list[Any]:
        return list(_wait([getattr(one, method).remote(*args) for one in self.trainers]))

    def _all_rollouts(self, method: str, *args: Any) -> list[Any]:
        return list(_wait([getattr(one, method).remote(*args) for one in self.rollouts]))

    def _most(self, reading: str) -> Temporary:
        return max(self._all_trainers(reading), key=lambda one: int(one.peak))


def _wait(refs: Any) -> Any:
    return ray.get(refs, timeout=_PATIENCE)


def _names(found: list[list[str]]) -> list[str]:
    return sorted({name for names in found for name in names})


PEERS: dict[str, Callable[[World], Contender]] = {
    "store": World.store,
    "broadcast": World.broadcast,
    "buckets": partial(World.broadcast, bucket=256 * MIB),
    "checkpoint": World.checkpoint,
}
"""What else brings weights over. Each takes gigabytes, so each has a world of its own."""
