"""Ray metrics of a decoder, recorded once for each request."""

from __future__ import annotations

from ray.util.metrics import Counter, Histogram

from fabric_ray.serve.messages import Timings

_SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
_STAGES = {
    "queue": "from a request's arrival until it has pages at its decoder",
    "prefill_queue": "of a prompt's wait at its prefiller",
    "prefill": "of a prompt's computation",
    "transfer": "of the wait for pages beyond queue and computation at the prefiller",
    "first_token": "from a request's arrival at its decoder to its first token",
    "per_token": "between tokens after the first",
}


class Metrics:
    """Histograms by stage, and a counter by outcome; their names begin with
    ``fabric_ray_serve_``."""

    def __init__(self) -> None:
        self._stages = {
            stage: Histogram(
                f"fabric_ray_serve_{stage}_seconds", f"seconds {what}", boundaries=_SECONDS
            )
            for stage, what in _STAGES.items()
        }
        self._requests = Counter(
            "fabric_ray_serve_requests", "requests that ended", tag_keys=("outcome",)
        )

    def record(self, timings: Timings) -> None:
        """Records a request that succeeded."""
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(timings, stage))

    def ended(self, outcome: str) -> None:
        """Counts any request: ``finished``, ``failed``, ``busy`` or ``cancelled``."""
        self._requests.inc(tags={"outcome": outcome})
