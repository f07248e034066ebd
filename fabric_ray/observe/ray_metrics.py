"""Metrics through Ray, which exports them from every node: the same names behind Ray's prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Lock, Thread

from ray.util.metrics import Counter, Gauge

from fabric_ray.engine.observability import Histogram
from fabric_ray.observe import process
from fabric_ray.observe.prometheus import buckets
from fabric_ray.observe.samples import FAMILIES, Family, Sample, samples

_log = logging.getLogger("fabric_ray.observe")


class RayExport:
    """Hands this process's metrics to Ray every few seconds, in a thread.

    Counters go as what they grew by. Ray's histograms take one value at a time; ours go as gauges
    ``_bucket``, ``_sum`` and ``_count``, which queries read like any histogram's.

    Args:
        interval: seconds.
        read: what is handed over; by default the metrics of this process's engines.
    """

    def __init__(
        self,
        interval: float = 5.0,
        read: Callable[[], list[Sample]] = lambda: samples(process.metrics().engines),
    ) -> None:
        self._read = read
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for family in FAMILIES:
            self._declare(family)
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = Lock()
        self._ended = Event()
        self._interval = interval
        self._thread = Thread(target=self._run, name="fabric-ray-metrics", daemon=True)
        self._thread.start()

    def _declare(self, family: Family) -> None:
        tags = family.labels
        if family.kind == "counter":
            # Ray puts the end on counters itself.
            name = family.name.removesuffix("_total")
            self._counters[family.name] = Counter(name, family.help, tag_keys=tags)
        elif family.kind == "gauge":
            self._gauges[family.name] = Gauge(family.name, family.help, tag_keys=tags)
        else:
            for end, keys in (("bucket", (*tags, "le")), ("sum", tags), ("count", tags)):
                name = f"{family.name}_{end}"
                self._gauges[name] = Gauge(name, family.help, tag_keys=keys)

    def tell(self) -> None:
        """Hands over what there is now."""
        with self._lock:  # what a counter has grown by is handed over once
            self._tell()

    def _tell(self) -> None:
        for sample in self._read():
            name, value = sample.family.name, sample.value
            tags = dict(zip(sample.family.labels, sample.labels, strict=True))
            if isinstance(value, Histogram):
                self._tell_histogram(name, tags, value)
            elif name in self._gauges:
                self._gauges[name].set(value, tags=tags)
            else:
                key = (name, sample.labels)
                grown = value - self._told.get(key, 0)
                if grown > 0:
                    self._counters[name].inc(grown, tags=tags)
                    self._told[key] = value

    def _tell_histogram(self, name: str, tags: dict[str, str], value: Histogram) -> None:
        bucket = self._gauges[f"{name}_bucket"]
        for bound, n in buckets(value):
            bucket.set(n, tags=tags | {"le": repr(bound)})
        bucket.set(value.count, tags=tags | {"le": "+Inf"})
        self._gauges[f"{name}_sum"].set(value.total / 1e9, tags=tags)
        self._gauges[f"{name}_count"].set(value.count, tags=tags)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self.tell()
            except Exception:
                # The next time may do: Ray's last values would look like those of now.
                _log.warning("metrics could not be handed to Ray", exc_info=True)

    def close(self) -> None:
        """Ends the thread, after a last word."""
        self._ended.set()
        self._thread.join()
        self.tell()
