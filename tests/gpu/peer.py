"""The other process of the GPU checks: it opens an engine, makes memory, and answers for it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.kernels import mappable


def pattern(seed: int, nbytes: int, device: str) -> torch.Tensor:
    """The same bytes in every process: cheap to make, and different at every 8 bytes."""
    words = torch.arange(-(-nbytes // 8), dtype=torch.int64, device=device)
    mixed = (words + seed) * 0x9E3779B97F4A7C1 ^ (words >> 7)
    return mixed.view(torch.uint8)[:nbytes].clone()


def made(seed: int, nbytes: int, device: str) -> torch.Tensor:
    """The pattern on a device; ``driver`` for GPU memory of the driver's."""
    if device != "driver":
        return pattern(seed, nbytes, device)
    memory = mappable(nbytes, torch.device("cuda", torch.cuda.current_device()))
    assert not memory.any()
    return memory.copy_(pattern(seed, nbytes, "cuda"))


def serve(connection: Connection, options: dict[str, Any]) -> None:
    """Answers until it is told to stop, or killed."""
    tensors: dict[str, torch.Tensor] = {}
    regions: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    if torch.cuda.is_available() and options.pop("cuda", True):
        torch.empty(1, device="cuda")
    with TransferEngine(**options) as engine:
        connection.send(engine.address)
        while True:
            match connection.recv():
                case ("make", name, seed, nbytes, device):
                    tensors[name] = made(seed, nbytes, device)
                    _settle(device)
                    regions[name] = engine.register(tensors[name])
                    connection.send(regions[name].descriptor())
                case ("count", name):
                    counters[name] = engine.counter()
                    connection.send(counters[name].ref)
                case ("holds", counter, n, name, seed, offset, nbytes):
                    # IC-2: looked at the moment the counter says so, without waiting for the GPU.
                    counters[counter].wait(n, timeout=30)
                    part = tensors[name][offset : offset + nbytes]
                    same = torch.equal(part, pattern(seed, nbytes, str(part.device)))
                    connection.send((same, counters[counter].value))
                case ("drop", name):
                    regions.pop(name).deregister()
                    tensors.pop(name)
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
                    connection.send(None)
                case ("explain", address):
                    connection.send(str(engine.explain(engine.peer(address))))
                case ("stop",):
                    connection.send(None)
                    return


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
