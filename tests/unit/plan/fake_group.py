"""A process group of torch in which one process plays any rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Torch believes to be one rank of a group; nothing is ever sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def local_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the memory from this rank's first element to past its last."""
    local = local_of(tensor)
    size = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True)) + 1
    return torch.as_strided(local, (size,), (1,)).clone().view(torch.uint8).numpy()
