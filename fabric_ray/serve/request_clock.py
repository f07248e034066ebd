"""Timestamps of one request at its decoder."""

from __future__ import annotations

import time

from fabric_ray.serve.messages import Timings


class RequestClock:
    """Moments of the monotonic clock, and the seconds that the prefiller reports."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.reserved = self.asked = self.ready = self.first = self.last = self.arrived
        self.prefill_queue = self.prefill = 0.0
        self.attempts = self.cached = 0

    def timings(self, tokens: int) -> Timings:
        """Where the time went until now; ``tokens`` have been generated."""
        between = (self.last - self.first) / (tokens - 1) if tokens > 1 else 0.0
        waited = self.ready - self.asked
        return Timings(
            queue=self.reserved - self.arrived,
            prefill_queue=self.prefill_queue,
            prefill=self.prefill,
            transfer=max(0.0, waited - self.prefill_queue - self.prefill),
            first_token=self.first - self.arrived,
            per_token=between,
            total=time.monotonic() - self.arrived,
            cached_tokens=self.cached,
            prefill_attempts=self.attempts,
        )
