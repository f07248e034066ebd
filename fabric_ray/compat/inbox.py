"""Notifications of peers that the caller has not read yet."""

from __future__ import annotations

import logging
import threading
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 1 << 16
MOST_BYTES = 64 << 20


class Inbox(Generic[T]):
    """Keeps a bounded number and bytes of notifications; drops further ones, with one warning until
    they are taken. For any thread.
    """

    def __init__(self, log: logging.Logger, *, most: int = MOST, most_bytes: int = MOST_BYTES):
        self._log, self._most, self._most_bytes = log, most, most_bytes
        self._lock = threading.Lock()
        self._kept: list[T] = []
        self._nbytes = 0
        self._dropping = False

    def add(self, notification: T, nbytes: int) -> None:
        """Keeps a notification of that size if there is room."""
        with self._lock:
            if len(self._kept) < self._most and self._nbytes + nbytes <= self._most_bytes:
                self._kept.append(notification)
                self._nbytes += nbytes
                return
            first, self._dropping = not self._dropping, True
        if first:
            self._log.warning(
                "notifications are dropped: %d of %d bytes wait to be read; read more often",
                len(self._kept),
                self._nbytes,
            )

    def take(self) -> list[T]:
        """Removes and returns all of them, the oldest first."""
        with self._lock:
            kept, self._kept = self._kept, []
            self._nbytes, self._dropping = 0, False
        return kept
