"""A trainer rank with an FSDP2 module, in a process of its own; rank 0 has the server too."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.integrations import vllm_fakes as fakes
from tests.unit.integrations.trainer_ranks import growth


class Trained(torch.nn.Module):
    """A trainer's module of the fake model's checkpoint."""

    def __init__(self, version: float) -> None:
        super().__init__()
        for i in range(3):
            layer = torch.nn.Module()
            for half in ("upper", "lower"):
                layer.register_parameter(half, torch.nn.Parameter(torch.zeros(2, 4)))
            self.add_module(f"l{i}", layer)
        self.turn_to(version)

    def turn_to(self, version: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                getattr(parameter, "_local_tensor", parameter).fill_(version)


def rank(connection: Connection, number: int, ranks: int, port: int, timeout: float = 60.0) -> None:
    """Takes a version to push, and ``dies``, the rank that is killed at its first write; answers
    with the error, and on rank 0 whether the server is paused and the versions of its weights.

    ``"refused"`` for a version has it make its end again, with a module that is refused on the rank
    ``dies``, and then once more; it answers with the error, and when it is ready.

    ``None`` for a version has it push, and make its end again, so many times; it answers with the
    files and the threads by which the process has grown."""
    for name, module in fakes.modules().items():
        sys.modules[name] = module
    backend: Any = importlib.import_module("fabric_ray.integrations.vllm")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
    module = fully_shard(Trained(0), mesh=init_device_mesh("cpu", (ranks,)))
    server = fakes.Server(
        backend.FabricWeightTransferEngine, backend.FabricUpdateInfo, backend.FabricInitInfo
    )

    def made(module: torch.nn.Module = module) -> Any:
        return backend.FabricTrainerWeightTransferEngine.trainer_init(
            backend.FabricTrainerInitInfo(rank=number, workers=1, timeout=timeout),
            client=server if number == 0 else None,
            source=module,
        )

    sender = made()
    connection.send("ready")
    while True:
        version, dies = connection.recv()
        if version == "refused":
            sender.shutdown()
            two_of_a_name = Trained(0)
            two_of_a_name.add_module("_orig_mod", Trained(0))
            try:
                made(two_of_a_name if number == dies else module)
            except Exception as caught:
                connection.send(f"{type(caught).__name__}: {caught}")
            sender = made()
            connection.send("ready")
            continue
        if version is None:

            def again() -> None:
                nonlocal sender
                sender.send_weights()
                sender.shutdown()
                sender = made()

            connection.send(growth(again, dies))
            continue
        module.turn_to(version)
        if dies == number:
            die_after_first_write()
        error = None
        try:
            sender.send_weights()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        connection.send((error, server.paused, server.model.versions()))


def die_after_first_write() -> None:
    from fabric_ray.weights.step_sender import StepSender

    send = StepSender.send

    def last(*args: Any) -> None:
        send(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    StepSender.send = last  # type: ignore[method-assign]
