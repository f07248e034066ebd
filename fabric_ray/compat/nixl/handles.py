"""What callers of ``nixl_agent`` hold: its end gives back what it stands for."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from fabric_ray.compat.nixl.core import nixlAgent


class Handle(ABC):
    """What a caller holds; its end releases what it stands for."""

    def __init__(self, agent: nixlAgent, value: int) -> None:
        self._agent, self._handle, self._released = agent, value, False
        self._releasing = threading.Lock()

    def release(self) -> None:
        """May be called more than once, by any thread."""
        with self._releasing:
            if not self._released:
                self._give_back()
                self._released = True

    @abstractmethod
    def _give_back(self) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle}, released={self._released})"

    def __del__(self) -> None:
        if not self._released:
            self._agent.drop(self._handle)


class nixl_prepped_dlist_handle(Handle):
    """A prepared list of descriptors."""

    def _give_back(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(Handle):
    """A transfer."""

    def _give_back(self) -> None:
        self._agent.releaseXferReq(self._handle)
