"""Two actors of one contender: one has a tensor, the other wants it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
import torch

import fabric_ray
from fabric_ray.runtime import rdt

fabric_ray.register()  # the name must be known before a class uses it

FABRIC, MAPPED, NIXL, GLOO = "fabric", "fabric mapped", "nixl", "gloo"
NUMPY, STORE = "store numpy", "store torch"
ONE_SIDED = {FABRIC: "fabric", MAPPED: "fabric", NIXL: "nixl"}
"""Contenders whose memory is registered, and how Ray calls their transport."""


class End:
    """Either end; every method is timed by its caller unless it returns seconds."""

    def __init__(self, contender: str) -> None:
        self._contender = contender
        self._tensor = torch.empty(0)
        self._ref: Any = None

    def ready(self) -> None:
        pass

    def fill(self, nbytes: int) -> None:
        """Makes the tensor; its memory is registered for good where the transport can do that."""
        if self._tensor.numel():
            self._register("deregister")
        mapped = self._contender == MAPPED
        empty = rdt.empty if mapped else torch.empty
        self._tensor = empty(nbytes, dtype=torch.uint8)
        self._tensor.copy_(pattern(nbytes))
        self._register("register")

    def _register(self, what: str) -> None:
        if self._contender == NIXL:
            getattr(ray.experimental, f"{what}_nixl_memory")(self._tensor)
        elif self._contender in ONE_SIDED:
            getattr(rdt, f"{what}_memory")(self._tensor)

    def plain(self) -> Any:
        """The tensor, by the object store."""
        return self._tensor.numpy() if self._contender == NUMPY else self._tensor

    @ray.method(tensor_transport="fabric")
    def by_fabric(self) -> torch.Tensor:
        return self._tensor

    @ray.method(tensor_transport="nixl")
    def by_nixl(self) -> torch.Tensor:
        return self._tensor

    @ray.method(tensor_transport="gloo")
    def by_gloo(self) -> torch.Tensor:
        return self._tensor

    def take(self, got: Any) -> tuple[int, int]:
        """Uses what came: first and last byte."""
        return int(got[0]), int(got[-1])

    def put(self) -> tuple[list[Any], float]:
        """Offers the tensor; the reference, and seconds that it took."""
        begin = time.perf_counter()
        transport = ONE_SIDED.get(self._contender)
        if transport is not None:
            ref = ray.put(self._tensor, _tensor_transport=transport)
        else:
            ref = ray.put(self.plain())
        return [ref], time.perf_counter() - begin

    def get_into(self, refs: list[Any]) -> float:
        """Seconds until the bytes are in this end's tensor."""
        self._tensor[0] = self._tensor[-1] = 0
        begin = time.perf_counter()
        if self._contender in ONE_SIDED:
            ray.experimental.set_target_for_ref(refs[0], [self._tensor])
            ray.get(refs[0])
        elif self._contender == NUMPY:
            np.copyto(self._tensor.numpy(), ray.get(refs[0]))
        else:
            self._tensor.copy_(ray.get(refs[0]))
        return time.perf_counter() - begin

    def equal(self) -> bool:
        """Whether the tensor holds the pattern."""
        return torch.equal(self._tensor, pattern(self._tensor.numel()))


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes in which whatever is missing or misplaced shows: a row of prime length, no byte 0."""
    row = (torch.arange(65521) * 2654435761 >> 13).to(torch.uint8) | 1
    return row.repeat(-(-nbytes // len(row)))[:nbytes]


class Pair:
    """The two actors, for as long as the block lasts."""

    def __init__(self, contender: str) -> None:
        self.contender = contender
        make: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)(End)
        if contender == STORE:
            env = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
            make = make.options(runtime_env={"env_vars": env})
        self.source, self.reader = make.remote(contender), make.remote(contender)
        ray.get([self.source.ready.remote(), self.reader.ready.remote()])
        if contender == GLOO:
            from ray.experimental.collective import create_collective_group

            self._group = create_collective_group([self.source, self.reader], backend="torch_gloo")

    def fill(self, nbytes: int) -> None:
        ray.get([self.source.fill.remote(nbytes), self.reader.fill.remote(nbytes)])

    def argument(self) -> float:
        """Seconds from the call of the source's method until the reader has used its result."""
        transport = "gloo" if self.contender == GLOO else ONE_SIDED.get(self.contender)
        begin = time.perf_counter()
        made = getattr(self.source, f"by_{transport}" if transport else "plain").remote()
        ends = ray.get(self.reader.take.remote(made))
        spent = time.perf_counter() - begin
        if 0 in ends:
            raise RuntimeError(f"{self.contender}: bytes are missing")
        return spent

    def target(self) -> float:
        """Seconds of offering and of fetching into the reader's tensor."""
        refs, offering = ray.get(self.source.put.remote())
        return float(offering + ray.get(self.reader.get_into.remote(refs)))

    def check(self) -> None:
        """Compares every byte of a fetch into the reader's tensor."""
        self.target()
        if not ray.get(self.reader.equal.remote()):
            raise RuntimeError(f"{self.contender}: bytes differ")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (self.source, self.reader):
            ray.kill(actor)
