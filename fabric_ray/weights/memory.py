"""Memory of pushes, on the host or on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine

if TYPE_CHECKING:
    import torch


def allocate(
    engine: TransferEngine, nbytes: int, device: torch.device | None
) -> tuple[Region, torch.Tensor]:
    """New registered memory, and the same as a tensor of bytes.

    Args:
        device: a GPU, or ``None`` for memory that the engine shares with processes of this host.
    """
    import torch

    if device is None:
        region = engine.alloc(nbytes)
        return region, region.tensor()
    flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return engine.register(flat), flat
