"""Ranks that find each other through a store, and one of them without the others."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

from fabric_ray.errors import PeerLost

_CONNECT_S = 300.0
_POLL_S = 0.02
_CLOSED = "-"
"""In place of an open generation."""


class StoreComm:
    """Ranks from 0 to ``size`` that gather through a ``torch.distributed`` store.

    All of them make it together, any number of times. What an attempt that failed left in the store
    is not read: rank 0 opens a generation of keys for each attempt, which the other ranks enter.

    Raises:
        PeerLost: a rank doesn't come within the timeout.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float = _CONNECT_S) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self._round = 0
        self._prefix = ""
        base = f"fabric_ray/nixl_ep/{size}"
        if rank == 0:
            self._open(base)
        else:
            self._enter(base)

    def _open(self, base: str) -> None:
        """Opens a generation until all ranks are in it; this rank's own key tells them so."""
        self._prefix = f"{base}/{uuid4().hex}"
        self._store.set(f"{base}/open", self._prefix)
        try:
            others = [self._key(rank) for rank in range(1, self._size)]
            while not self._store.check(others):  # one of them may have given up since it came
                for rank in range(1, self._size):
                    self._wait(rank)
        finally:
            self._store.set(f"{base}/open", _CLOSED)
        self._store.set(self._key(0), b"+")

    def _enter(self, base: str) -> None:
        """Enters the open generation, or a later one as long as rank 0 didn't see all ranks."""
        until = time.monotonic() + self._timeout
        while not (self._prefix and self._store.check([self._key(0)])):
            if self._store.check([f"{base}/open"]):
                found = bytes(self._store.get(f"{base}/open")).decode()
                if found not in (_CLOSED, self._prefix):
                    self._prefix = found
                    self._store.set(self._key(self._rank), b"+")
            if time.monotonic() > until:
                if self._prefix:
                    self._store.delete_key(self._key(self._rank))
                raise self._lost(0, "it ended, or waits for another rank")
            time.sleep(_POLL_S)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._round}/{rank}"

    def _wait(self, rank: int) -> None:
        try:
            self._store.wait([self._key(rank)], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self._lost(rank, str(error)) from error

    def _lost(self, rank: int, cause: str) -> PeerLost:
        return PeerLost(
            f"rank {rank} did not connect within {self._timeout:g} s: {cause}; look for a "
            "rank that ended",
            peer=f"rank {rank}",
        )

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_gather(self, value: bytes) -> list[bytes]:
        before = self._key(self._rank)
        self._round += 1
        self._store.set(self._key(self._rank), b"+" + value)
        found = []
        for rank in range(self._size):
            self._wait(rank)
            found.append(bytes(self._store.get(self._key(rank)))[1:])
        # All ranks that are in this round have read the one before.
        self._store.delete_key(before)
        return found


class AloneComm:
    """One of several ranks, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_gather(self, value: bytes) -> list[bytes | None]:
        return [value if rank == self._rank else None for rank in range(self._size)]
