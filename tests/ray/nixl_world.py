"""A program of its own, in which `import nixl` finds our face: Ray's transport of that name
moves tensors over it."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import ray
import torch


class End:
    """Makes tensors, or takes them."""

    @ray.method(tensor_transport="nixl")
    def make(self, n: int) -> torch.Tensor:
        return torch.arange(n)

    def is_range(self, tensor: torch.Tensor, n: int) -> bool:
        return torch.equal(tensor, torch.arange(n))

    def face(self) -> str:
        return str(importlib.import_module("nixl._api").__name__)


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
    maker, taker = (ray.remote(num_cpus=0)(End).remote() for _ in range(2))
    ends: list[Any] = [maker, taker]
    for end in ends:
        assert ray.get(end.face.remote()) == "fabric_ray.compat.nixl.agent"
    for n in (1, 1 << 10, 1 << 20, 1 << 10):
        assert ray.get(ends[1].is_range.remote(ends[0].make.remote(n), n), timeout=60)
    print("arrived")


if __name__ == "__main__":
    main()
