"""Actors that share one GPU and pass tensors in its memory by reference."""

from __future__ import annotations

from typing import Any

import ray
import torch

import fabric_ray
from fabric_ray.runtime.rdt import registration
from tests.gpu.peer import pattern

fabric_ray.register()  # the name must be known before a class uses it

GPU = "cuda"


def mixed(seed: int, nbytes: int) -> dict[str, Any]:
    """Tensors in GPU and host memory, and views of one of them."""
    whole = pattern(seed, nbytes, GPU)
    return {
        "gpu": whole,
        "views": [whole[7:1000], whole[: nbytes // 8 * 8].view(torch.int64)],
        "host": [pattern(seed + 1, nbytes, "cpu"), torch.tensor(3.5)],
        "empty": torch.empty(0, 4, device=GPU),
        "step": seed,
    }


def same(a: Any, b: Any) -> bool:
    """Also of devices."""
    if isinstance(a, torch.Tensor):
        return a.device.type == b.device.type and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@ray.remote(num_cpus=0, num_gpus=0.2, enable_tensor_transport=True)
class Holder:
    """Makes and takes tensors in GPU memory."""

    def __init__(self) -> None:
        torch.empty(1, device=GPU)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def ready(self) -> None:
        """It has been made."""

    @ray.method(tensor_transport="fabric")
    def make(self, seed: int, nbytes: int) -> torch.Tensor:
        return pattern(seed, nbytes, GPU)

    @ray.method(tensor_transport="fabric")
    def make_late(self, seed: int, nbytes: int) -> torch.Tensor:
        """Returns while another stream has yet to write the bytes."""
        wanted, made = (
            pattern(seed, nbytes, GPU),
            torch.zeros(nbytes, dtype=torch.uint8, device=GPU),
        )
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(500_000_000)
            made.copy_(wanted)
        wanted.record_stream(self._stream)
        return made

    @ray.method(tensor_transport="fabric")
    def make_mixed(self, seed: int, nbytes: int) -> dict[str, Any]:
        return mixed(seed, nbytes)

    def holds(self, got: torch.Tensor, seed: int, nbytes: int) -> tuple[bool, str]:
        # Without a wait for the GPU: the bytes are there when the method is called.
        return torch.equal(got, pattern(seed, nbytes, str(got.device))), got.device.type

    def holds_mixed(self, got: Any, seed: int, nbytes: int) -> bool:
        return same(got, mixed(seed, nbytes))

    def fetch(self, refs: list[Any], seed: int, nbytes: int) -> list[bool]:
        """Many at once, by a get of its own."""
        return [
            torch.equal(got, pattern(seed + i, nbytes, GPU)) for i, got in enumerate(ray.get(refs))
        ]

    def held(self) -> tuple[int, int, int]:
        """Bytes that torch has given out on the GPU, objects that are offered, regions."""
        exchange = registration.transport().exchange()
        blocks = sum(map(len, exchange.pool._idle.values()))
        regions = exchange.engine.stats()["regions"] - blocks
        return torch.cuda.memory_allocated(), len(exchange.sources), regions
