"""Wall time of stages."""

from __future__ import annotations

import time


class Clock:
    """Starts when it is made; each lap ends a stage."""

    def __init__(self) -> None:
        self.began = time.time()
        """Seconds since the epoch."""
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds up to the last lap."""
        return self._last - self._start
