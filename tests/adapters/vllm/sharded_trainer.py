"""One of several trainers with a module that FSDP2 shards: ``python sharded_trainer.py URL OPTIONS
RANK RANKS PORT``, with a JSON object of ``FabricTrainerInitInfo``'s fields. It runs under the
Python of the servers.

Each line of its input is a JSON object: the ``checkpoint`` to send, and ``dies``, the rank that is
killed when it has written its first bytes. Each line of its output is an object: the ``error``, or
``null``, and the ``bytes`` that all ranks sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def sharded(checkpoint: str, ranks: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def turn_to(module: torch.nn.Module, checkpoint: str) -> None:
    """Fills the shards as a training step would."""
    from transformers import AutoModelForCausalLM

    # Names of a checkpoint differ from those of a module with experts.
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    whole = dict(loaded.named_parameters())
    with torch.no_grad():
        for name, own in module.named_parameters():
            new: Any = distribute_tensor(whole[name], own.device_mesh, own.placements)
            own.to_local().copy_(new.to_local())


def die_after_first_write() -> None:
    from fabric_ray.weights.step_sender import StepSender

    send = StepSender.send

    def last(*args: Any) -> None:
        send(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    StepSender.send = last  # type: ignore[method-assign]


def main(url: str, options: dict[str, Any], rank: int, ranks: int, port: str) -> None:
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from fabric_ray.integrations.vllm import FabricTrainerInitInfo
    from fabric_ray.integrations.vllm_plugin import register

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    register()
    module: Any = None
    sender: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        error, nbytes = None, 0
        try:
            if sender is None:
                module = sharded(asked["checkpoint"], ranks)
                info = {"rank": rank, "workers": 1, "timeout": 120.0, "shards": True, **options}
                sender = WeightTransferTrainerFactory.trainer_init(
                    FabricTrainerInitInfo(**info),
                    client=HTTPVLLMWeightSyncClient(url),
                    source=ModuleSource(module),
                )
            turn_to(module, asked["checkpoint"])
            if asked["dies"] == rank:
                die_after_first_write()
            sender.send_weights()
            nbytes = sender._sharded.report.nbytes if rank == 0 else 0
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        sys.stdout.write(f"> {json.dumps({'error': error, 'bytes': nbytes})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
