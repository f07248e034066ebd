"""One of the FSDP2 ranks that update a vLLM server: ``python -m benchmarks.push.vllm_trainer URL
RANK RANKS PORT CHECKPOINT``, under the Python of the servers.

Each line of its input is a JSON list: a method of :class:`Trainer` and its arguments. It answers by
a pair: the result, and the error or ``null``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import ParamMeta, materialize_full_tensor
from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

from benchmarks.push.memory import Mark
from fabric_ray.demo.actors import PlainCopy
from fabric_ray.integrations.vllm import FabricTrainerInitInfo
from fabric_ray.integrations.vllm_control import control_at
from fabric_ray.integrations.vllm_plugin import register
from tests.adapters.vllm import sharded_trainer

DTYPE = torch.bfloat16
"""Of the server's model; the trainers' masters are float32."""


class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Counts the seconds for which its server is paused."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._control: Any = control_at(url, self.timeout)
        self.paused = self._since = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def pause_generation(self, mode: str) -> None:
        self._since = time.monotonic()
        self._control.pause_generation(mode)

    def resume_generation(self) -> None:
        self._control.resume_generation()
        self.paused += time.monotonic() - self._since


class Gathered(ModuleSource):  # type: ignore[misc]
    """Whole tensors, cast before they are gathered: half the bytes of the masters."""

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(meta.name, DTYPE, meta.shape) for meta in super().metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, materialize_full_tensor(parameter.detach().to(DTYPE))


class Reload:
    """vLLM's own method without a GPU: its workers reload a checkpoint."""

    def __init__(self, source: Gathered, client: Client, folder: Path) -> None:
        self._source, self._client, self._folder = source, client, folder

    def send_weights(self) -> None:
        whole = {name: tensor for name, tensor in self._source if not dist.get_rank()}
        if not whole:
            return
        save_file(whole, self._folder / "model.safetensors")
        whole.clear()
        self._client.pause_generation("keep")
        options = {"weights_path": str(self._folder)}
        self._client._post("collective_rpc", {"method": "reload_weights", "kwargs": options})
        self._client.reset_prefix_cache(True, True)
        self._client.resume_generation()

    def shutdown(self) -> None:
        """Nothing is open."""


class Trainer:
    def __init__(self, url: str, rank: int, ranks: int, port: str, checkpoint: str) -> None:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        register()
        self._rank, self._ranks, self._client = rank, ranks, Client(url)
        self._module = sharded_trainer.sharded(checkpoint, ranks)
        self._gathered = Gathered(self._module)
        self._nbytes = DTYPE.itemsize * sum(p.numel() for p in self._module.parameters())
        self._sender: Any = None

    def ready(self) -> None:
        """Answers when the module is loaded."""

    def turn_to(self, checkpoint: str) -> None:
        """Changes the weights as a training step would."""
        sharded_trainer.turn_to(self._module, checkpoint)

    def open(self, method: str, folder: str) -> float:
        """Opens this rank's end; returns seconds. Memory counts from here."""
        self._mark = Mark()
        began = time.monotonic()
        if method == "reload":
            self._sender = Reload(self._gathered, self._client, Path(folder))
        else:
            self._sender = WeightTransferTrainerFactory.trainer_init(
                FabricTrainerInitInfo(rank=self._rank, workers=1),
                client=self._client,
                source=self._module if method == "sharded" else self._gathered,
            )
        return time.monotonic() - began

    def update(self) -> dict[str, float]:
        """Seconds of an update, and for how many of them the server was paused; bytes that went
        from process to process, and of memory that this one took."""
        dist.barrier()
        self._client.paused, began = 0.0, time.monotonic()
        self._sender.send_weights()
        seconds = time.monotonic() - began
        own, moved = None, self._nbytes * self._ranks  # gathered by all ranks, then sent once
        if (push := getattr(self._sender, "_sharded", None)) is not None:
            ring = push._source.temporary
            own, moved = ring and ring.addr, push.report.nbytes if push.report else 0
        elif (outbox := getattr(self._sender, "_outbox", None)) is not None:
            own = outbox._memory.addr
        peak, _ = self._mark.peak(own)
        return {"seconds": seconds, "paused": self._client.paused, "moved": moved, "peak": peak}

    def close(self) -> None:
        self._sender.shutdown()
        if not self._rank and not isinstance(self._sender, Reload):
            self._client.shutdown_weight_transfer_engine()

    def floor(self) -> float:
        """Seconds to copy this rank's share of the bytes, while the others copy theirs."""
        copy = PlainCopy(1)
        dist.barrier()
        return copy.run(self._nbytes // self._ranks)

    def refuse(self, backend: str, port: int) -> None:
        """Updates by a back end of vLLM that needs GPUs, whatever comes of it."""
        info = WeightTransferTrainerFactory._registry[backend]().init_info_cls
        taken = {field.name for field in fields(info)}
        senders = self._ranks if "num_trainer_ranks" in taken else 1
        offered = {
            **{"rank": self._rank, "num_trainer_ranks": senders, "world_size": senders + 1},
            **{"master_address": "127.0.0.1", "master_port": port, "num_consumers": 1},
        }
        source: Any = ModuleSource(self._module)
        if backend == "sparse_nccl":
            source = None
        elif backend == "nccl_m2n":
            source = DTensorModuleSource(self._module, self._ranks)
        WeightTransferTrainerFactory.trainer_init(
            info(**{name: value for name, value in offered.items() if name in taken}),
            client=self._client,
            source=source,
        ).send_weights()


def main(url: str, rank: str, ranks: str, port: str, checkpoint: str) -> None:
    trainer = Trainer(url, int(rank), int(ranks), port, checkpoint)
    for line in sys.stdin:
        name, *args = json.loads(line)
        answer: tuple[Any, str | None]
        try:
            answer = getattr(trainer, name)(*args), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        sharded_trainer.say(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
