"""One of several trainers with a module that FSDP2 shards: ``python sharded_trainer.py URLS OPTIONS
RANK RANKS PORT``, with the servers' addresses, separated by commas, and a JSON object of
``FabricTrainerInitInfo``'s fields. It runs under the Python of the servers.

Each line of its input is a JSON object: the ``checkpoint`` to send, and ``dies``, the moment at
which this rank is killed, if it is: ``write``, a key of :data:`MOMENTS`, or seconds from the begin
of the push. Its output is two lines for each: ``null`` when the push begins, and an object: the
``error``, or ``null``, the ``bytes`` that all ranks sent, and the ``seconds`` of the push.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


class Servers:
    """A client of one or more servers; each call is made to all."""

    def __init__(self, urls: str) -> None:
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

        from fabric_ray.integrations.vllm_control import control_at

        clients = [HTTPVLLMWeightSyncClient(url) for url in urls.split(",")]
        self.base_url = clients[0].base_url
        self._ends = [(client, control_at(client.base_url, 300.0)) for client in clients]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            ends = [next(end for end in each if hasattr(end, name)) for each in self._ends]
            with ThreadPoolExecutor(len(ends)) as pool:
                said = list(pool.map(lambda end: getattr(end, name)(*args), ends))
            return any(said) if name == "is_paused" else all(said)

        return call


MOMENTS = {"start": "start_weight_update", "flip": "update_weights"}
"""After which calls of vLLM a rank is killed."""


def die(moment: str | float, client: Servers) -> None:
    """Kills this process at a moment of its next push."""
    from fabric_ray.weights.step_sender import StepSender

    if isinstance(moment, float):
        threading.Timer(moment, kill).start()
        return
    owner, name = (StepSender, "send") if moment == "write" else (client, MOMENTS[moment])
    made = getattr(owner, name)

    def last(*args: Any) -> None:
        made(*args)
        kill()

    setattr(owner, name, last)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(value: object) -> None:
    sys.stdout.write(f"> {json.dumps(value)}\n")
    sys.stdout.flush()


def run(
    opened: Callable[[torch.nn.Module], Any],
    sharded: Callable[[str], torch.nn.Module],
    client: Servers | None = None,
) -> None:
    """Answers each line of the input.

    Args:
        opened: opens this rank's end for a module.
        client: by whose calls this rank may die.
    """
    module: Any = None
    sender: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        error, nbytes, began = None, 0, 0.0
        try:
            if sender is None:
                module = sharded(asked["checkpoint"])
                sender = opened(module)
            turn_to(module, asked["checkpoint"])
            if asked["dies"] is not None:
                assert client is not None
                die(asked["dies"], client)
            say(None)
            began = time.monotonic()
            sender.send_weights()
            if sender.report is not None:
                nbytes = sender.report.nbytes
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        if not began:
            say(None)
        say({"error": error, "bytes": nbytes, "seconds": time.monotonic() - began})


def main(urls: str, options: dict[str, Any], rank: int, ranks: int, port: str) -> None:
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from fabric_ray.integrations.vllm import FabricTrainerInitInfo
    from fabric_ray.integrations.vllm_plugin import register

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    register()
    client = Servers(urls)
    info = {"rank": rank, "workers": 1, "timeout": 120.0, **options}

    def opened(module: torch.nn.Module) -> Any:
        return WeightTransferTrainerFactory.trainer_init(
            FabricTrainerInitInfo(**info), client=client, source=ModuleSource(module)
        )

    run(opened, lambda checkpoint: sharded(checkpoint, ranks), client)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
