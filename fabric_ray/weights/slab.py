"""The memory that versions arrive in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import NotQuiesced
from fabric_ray.plan import LocalContainer

if TYPE_CHECKING:
    import torch

# Every container begins on a boundary that suits any kernel.
_ALIGN = 256
# A peer on this host lets go within microseconds, unless it is stopped.
_QUIESCE_S = 2.0


class Slab:
    """Memory for one version of all containers."""

    def __init__(self, engine: TransferEngine, containers: tuple[LocalContainer, ...]) -> None:
        self.offsets: dict[int, int] = {}
        end = 0
        for c in containers:
            self.offsets[c.index] = end
            end += -(-c.nbytes // _ALIGN) * _ALIGN
        self._memory = engine.alloc(max(end, 1))
        self._engine = engine
        # Peers are given a registration of its own, so that its key can be changed.
        self.region: Region = engine.register(self._memory.numpy())

    def views(self, containers: tuple[LocalContainer, ...]) -> dict[str, torch.Tensor]:
        import torch

        flat = self._memory.tensor()
        out = {}
        for c in containers:
            dtype = getattr(torch, c.dtype)
            part = flat[self.offsets[c.index] : self.offsets[c.index] + c.nbytes].view(dtype)
            itemsize = part.element_size()
            out[c.name] = part.as_strided(c.shape, tuple(s // itemsize for s in c.strides))
        return out

    def lock_out(self) -> bool:
        """Gives the memory a new key: whatever still holds the old one is refused (MR-2).

        False if somebody may still write by the old one: then this memory must not be used again.
        """
        try:
            self.region.deregister(timeout=_QUIESCE_S)
        except NotQuiesced:
            return False
        self.region = self._engine.register(self._memory.numpy())
        return True
