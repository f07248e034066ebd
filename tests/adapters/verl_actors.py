"""Workers of verl, with small tensors in place of a model and of an inference engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

CONFIG = CheckpointEngineConfig(
    backend="fabric",
    update_weights_bucket_megabytes=1,
    custom_backend_module="fabric_ray.integrations.verl",
    engine_kwargs={"fabric": {"timeout": 20.0, "rollout_dtype": "bfloat16"}},
)


def model(step: int) -> dict[str, torch.Tensor]:
    """What trainers hold: some fp32, one larger than a bucket."""
    generator = torch.Generator().manual_seed(step)
    layers = {
        f"layers.{i}.weight": torch.randn(300, 400, generator=generator).bfloat16()
        for i in range(12)
    }
    return {
        "embed": torch.randn(1000, 1100, generator=generator),
        **layers,
        "position": torch.arange(7),
    }


class Trainer(Worker):  # type: ignore[misc]
    """A trainer, as verl's: the lines of its worker that concern checkpoint engines."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(CONFIG.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            CONFIG.backend,
            is_master=self.rank == 0,
            bucket_size=CONFIG.update_weights_bucket_megabytes << 20,
            **CONFIG.engine_kwargs[CONFIG.backend],
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        gathered = self._gathered(global_steps)
        await self.checkpoint_engine.send_weights(gathered, global_steps=global_steps)
        return {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def _gathered(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model(step).items()


class Adapter:
    """Where verl hands weights to an inference engine."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.dies_at = ""
        self.step: int | None = None
        self.weights: dict[str, torch.Tensor] = {}

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        self.weights = {}
        async for name, tensor in weights:
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.weights[name] = tensor.clone()
        self.step = global_steps


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's own rollout worker, with an engine that keeps what it is given."""

    def __init__(self) -> None:
        config = SimpleNamespace(name="vllm", mode="async", checkpoint_engine=CONFIG)
        super().__init__(config, None, server_adapter=Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wrong(self, step: int) -> list[str]:
        """What isn't as it was sent."""
        found, sent = self.server_adapter.weights, model(step)
        want = {n: t.bfloat16() if t.is_floating_point() else t for n, t in sent.items()}
        assert self.server_adapter.step == step
        assert list(found) == list(want)
        return [name for name in want if not torch.equal(found[name], want[name])]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_at(self, name: str) -> None:
        self.server_adapter.dies_at = name
