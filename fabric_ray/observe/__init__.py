"""Metrics, flight records of transfers, and access to them.

``FABRIC_RAY_OBSERVE=1`` in a process's environment, or :func:`serve` in its code, lets
``fabric-ray top`` and ``fabric-ray trace`` look into it.
"""

from fabric_ray.observe.joining import Flight, Place, Received, join, story
from fabric_ray.observe.process import (
    Clock,
    ProcessMetrics,
    ProcessRecords,
    dump,
    load,
    metrics,
    records,
)
from fabric_ray.observe.prometheus import Endpoint
from fabric_ray.observe.serving import serve, stop
from fabric_ray.observe.spans import span

__all__ = [
    "Clock",
    "Endpoint",
    "Flight",
    "Place",
    "ProcessMetrics",
    "ProcessRecords",
    "Received",
    "dump",
    "join",
    "load",
    "metrics",
    "records",
    "serve",
    "span",
    "stop",
    "story",
]
