"""A trainer of miles and an engine of SGLang, as far as weights go: their calls, real tensors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fabric_ray import TransferEngine
from fabric_ray.integrations.miles import UpdateWeightFabric
from fabric_ray.integrations.sglang import FabricWorker
from fabric_ray.models import ModelConfig, parameter_shapes
from fabric_ray.plan import Side
from fabric_ray.runtime.token import cluster_token
from fabric_ray.weights import EngineHooks, WeightSource
from fabric_ray.weights.families import target_containers, target_side

CONFIG = ModelConfig(
    kind="llama", vocab=96, hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate=48
)
TP = 2
ARGS = SimpleNamespace(rollout_num_gpus_per_engine=TP, pause_generation_mode="retract")


def trained(version: int) -> dict[str, torch.Tensor]:
    """What all trainers hold at a version."""
    generator = torch.Generator().manual_seed(version)
    shapes = parameter_shapes(CONFIG).items()
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes}


def layout(engines: int) -> Side:
    return target_side(CONFIG, tp=TP, ranks=range(TP * engines))


def engine() -> TransferEngine:
    return TransferEngine(token=cluster_token(), peer_timeout=4.0)


class Trainer:
    """Two of them hold the model whole and share the sending."""

    def __init__(self, rank: int, store: str) -> None:
        dist.init_process_group(
            "gloo", f"file://{store}", timedelta(seconds=60), world_size=2, rank=rank
        )
        self.weights = trained(0)
        self.updater = UpdateWeightFabric(
            ARGS,
            [],
            weights_getter=lambda: self.weights,
            model_name="llama",
            quantization_config=None,
            source=lambda updater: WeightSource(
                dict(updater.weights_getter()), rank=updater.rank, engine=engine()
            ),
            options={"digest": True, "timeout": 10.0},
        )

    def connect(self, engines: list[Any]) -> None:
        self.updater.connect_rollout_engines(engines, None, [TP] * len(engines))

    def update(self, seed: int) -> int:
        for name, tensor in trained(seed).items():
            self.weights[name].copy_(tensor)
        self.updater.update_weights()
        return self.updater.weight_version

    def leave(self) -> None:
        self.updater._source.close()
        dist.destroy_process_group()

    @staticmethod
    def join_as(actor: Any, rank: int, store: str) -> None:
        """In an actor of the tests."""
        actor.miles = Trainer(rank, store)
        actor.part = actor.miles.updater._source

    @staticmethod
    def connect_as(actor: Any, engines: list[Any]) -> None:
        actor.miles.connect(engines)

    @staticmethod
    def update_as(actor: Any, seed: int) -> int:
        return actor.miles.update(seed)


class ForgetfulHooks(EngineHooks):
    """Loses a tensor when a version is about to be copied, after all have confirmed it."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine, self._rank = engine, rank

    def pause_generation(self) -> None:
        if self._engine.forgetful == self._rank:
            del self._engine.held[self._rank]["model.norm.weight"]


class Engine:
    """Its methods are those of miles' ``SGLangEngine``; its workers share this process."""

    def __init__(self) -> None:
        self.held = [
            {
                c.name: torch.zeros(c.shape, dtype=getattr(torch, c.dtype))
                for c in target_containers(CONFIG, tp=TP, rank=rank)
            }
            for rank in range(TP)
        ]
        self.workers = [self._worker(rank) for rank in range(TP)]
        self.calls: list[str] = []
        self.broken = ""
        self.forgetful: int | None = None

    def get_remote_instance_transfer_engine_info(self, rank: int) -> tuple[str, dict[str, Any]]:
        return self.workers[rank].session_id, self.workers[rank].weights_info

    def pause_generation(self, mode: str = "retract") -> None:
        self._call(f"pause_generation {mode}")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def post_process_weights(
        self,
        restore_weights_before_load: bool = False,
        post_process_quantization: bool = False,
        post_load_weights: bool = False,
    ) -> None:
        assert post_process_quantization == post_load_weights != restore_weights_before_load
        self._call("unpack" if restore_weights_before_load else "pack")

    def update_weight_version(self, weight_version: str) -> None:
        self._call(f"update_weight_version {weight_version}")

    def continue_generation(self) -> None:
        self._call("continue_generation")

    def broken_at(self, call: str) -> None:
        self.broken = call

    def end_worker(self, rank: int) -> None:
        self.workers[rank].close()

    def start_worker(self, rank: int) -> None:
        self.workers[rank] = self._worker(rank)

    def forget_at_next_commit(self, rank: int) -> None:
        self.forgetful = rank

    def state(self) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
        """The calls since the last time, and the weights."""
        calls, self.calls = self.calls, []
        return calls, self.held

    def _worker(self, rank: int) -> FabricWorker:
        hooks = ForgetfulHooks(self, rank)
        return FabricWorker(
            self.held[rank], layout, rank=rank, ranks=TP, engine=engine(), hooks=hooks
        )

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if call == self.broken:
            self.broken = ""
            raise RuntimeError("not now")
