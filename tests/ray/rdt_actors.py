"""Actors whose tensors travel by reference."""

from __future__ import annotations

import os
import threading
from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref

import fabric_ray
from fabric_ray.runtime.rdt import registration

fabric_ray.register()  # the name must be known before a class uses it


def tree(value: float, n: int = 100_000) -> dict[str, Any]:
    """Tensors of many kinds, nested, and things that are none."""
    grid = torch.arange(60.0).view(6, 10) * value
    return {
        "large": torch.full((n,), value),
        "nested": [grid.t(), {"half": (grid[2:4] / 7).to(torch.bfloat16)}],
        "small": (torch.tensor(value), torch.empty(0, 3), torch.tensor([True, False])),
        "name": "step",
        "step": 3,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Peer:
    """Makes tensors, keeps tensors, takes tensors."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.gate = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def id(self) -> str:
        return str(ray.get_runtime_context().get_actor_id())

    @ray.method(tensor_transport="fabric")
    def make(self, value: float, n: int = 100_000) -> dict[str, Any]:
        return tree(value, n)

    @ray.method(tensor_transport="fabric")
    def keep(self, n: int) -> torch.Tensor:
        """A tensor that the actor has as well."""
        if self.kept is None:
            self.kept = torch.zeros(n)
        return self.kept

    @ray.method(tensor_transport="fabric")
    def views(self) -> list[torch.Tensor]:
        self.kept = torch.arange(1000.0)
        return [self.kept, self.kept, self.kept[10:20], self.kept[15:400].view(5, 77)]

    @ray.method(tensor_transport="fabric")
    def sparse(self) -> list[torch.Tensor]:
        return [torch.ones(4), torch.eye(4).to_sparse()]

    @ray.method(tensor_transport="fabric")
    def none(self) -> dict[str, int]:
        return {"step": 3}

    @ray.method(tensor_transport="fabric")
    def with_gradients(self) -> list[torch.Tensor]:
        return [torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4))]

    @ray.method(tensor_transport="fabric")
    def make_ones(self) -> torch.Tensor:
        return torch.ones(9)

    def put(self, value: float) -> list[Any]:
        """A reference, in a list so that it stays one."""
        return [ray.put(tree(value), _tensor_transport="fabric")]

    def is_tree(self, got: Any, value: float, n: int = 100_000) -> bool:
        return same(got, tree(value, n))

    def total(self, *tensors: Any) -> float:
        return float(sum(tensor.sum() for each in tensors for tensor in _tensors(each)))

    def kinds(self, got: list[torch.Tensor]) -> list[tuple[str, bool]]:
        return [(type(tensor).__name__, tensor.requires_grad) for tensor in got]

    def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def total_of(self, refs: list[Any]) -> float:
        return float(sum(tensor.sum() for tensor in ray.get(refs)))

    def is_kept(self, got: torch.Tensor) -> bool:
        return got is self.kept

    def fetch(self, refs: list[Any], value: float) -> bool:
        """Many references at once."""
        return all(same(got, tree(value)) for got in ray.get(refs))

    def fetch_into(self, refs: list[Any], nbytes: int) -> tuple[float, bool]:
        given = torch.zeros(nbytes)
        set_target_for_ref(refs[0], [given])
        got = ray.get(refs[0])
        return float(given.sum()), got.data_ptr() == given.data_ptr()

    def held(self) -> tuple[int, int, int]:
        """Objects in Ray's store and ours, and regions that are registered."""
        store = ray._private.worker.global_worker.rdt_manager.rdt_store
        exchange = registration.transport().exchange()
        regions = exchange.engine.stats()["regions"]
        blocks = sum(map(len, exchange.pool._idle.values()))
        return store.get_num_objects(), len(exchange.sources), regions - blocks

    def wait(self) -> None:
        self.gate.wait(60)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Async:
    """An actor with an event loop."""

    async def total(self, refs: list[Any]) -> float:
        import asyncio

        tensors = await asyncio.to_thread(ray.get, refs)
        return float(sum(tensor.sum() for tensor in tensors))

    async def awaits(self, refs: list[Any]) -> str:
        """What waiting for a reference itself comes to."""
        import asyncio

        try:
            return str(await asyncio.wait_for(refs[0], 3))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    found = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [tensor for each in found for tensor in _tensors(each)]
