"""All that a process has for tensors that travel by reference."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch

from fabric_ray.engine import TransferEngine
from fabric_ray.runtime.rdt.fetches import Fetches
from fabric_ray.runtime.rdt.offer import Holder
from fabric_ray.runtime.rdt.pool import Pool, default_limit
from fabric_ray.runtime.rdt.sources import Sources


class Exchange:
    """Sources, fetches and memory around one engine. Knows nothing of Ray. Closed when the process
    ends, if not before.

    Args:
        engine: its own; closed with it.
        holder: how others call this process.
        timeout: seconds that a fetch may take.
        idle: bytes that may lie idle between fetches; :func:`default_limit` by default.
    """

    def __init__(
        self, engine: TransferEngine, holder: Holder, *, timeout: float, idle: int | None = None
    ) -> None:
        self.engine = engine
        self.sources = Sources(engine, holder)
        self.pool = Pool(engine, default_limit() if idle is None else idle)
        self.fetches = Fetches(engine, self.sources, self.pool, timeout=timeout)
        atexit.register(self.close)

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor in memory that peers on this host map.

        Raises:
            InvalidArgument: a size below 0.
            ResourceError: no room; the message says where.
        """
        tensor, _ = self.engine.empty(shape if isinstance(shape, int) else tuple(shape), dtype)
        return tensor

    def close(self) -> None:
        """What is under way fails, and what peers read here fails as well."""
        self.disown()
        self.engine.close()
        self.pool.close()

    def disown(self) -> None:
        """Leaves it to the process that this one was forked from."""
        atexit.unregister(self.close)
