"""What happened to a request at its decoder, and when."""

from __future__ import annotations

import time

from fabric_ray.serve.wire import Timings


class Clock:
    """Moments of one request, on the monotonic clock; seconds that its prefiller tells."""

    def __init__(self) -> None:
        self.came = time.monotonic()
        self.seated = self.asked = self.ready = self.first = self.last = self.came
        self.prefill_queue = self.prefill = 0.0
        self.attempts = self.cached = 0

    def timings(self, tokens: int) -> Timings:
        """Where the time went until now, with so many tokens generated."""
        between = (self.last - self.first) / (tokens - 1) if tokens > 1 else 0.0
        waited = self.ready - self.asked
        return Timings(
            queue=self.seated - self.came,
            prefill_queue=self.prefill_queue,
            prefill=self.prefill,
            transfer=max(0.0, waited - self.prefill_queue - self.prefill),
            first_token=self.first - self.came,
            per_token=between,
            total=time.monotonic() - self.came,
            cached_tokens=self.cached,
            prefill_attempts=self.attempts,
        )
