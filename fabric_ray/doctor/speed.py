"""Writes to another host: bytes compared, latency and bandwidth."""

from __future__ import annotations

import hashlib
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_ray.doctor.findings import Speed
from fabric_ray.engine import CounterRef, Region, RegionDescriptor, Transfer, TransferEngine
from fabric_ray.errors import FabricError

NBYTES = 16 << 20
"""Bytes of a large write, and of its target."""
_SMALL_NBYTES = 8
_SMALL_WRITES = 50
_MEASURE_S = 0.5
_UNDER_WAY = 2


@dataclass(frozen=True)
class Sent:
    """The result of a write."""

    digest: bytes
    speed: Speed
    way: str
    """The engine's reason for its choice of transport."""


def digest(region: Region) -> bytes:
    """The SHA-256 of a region."""
    return hashlib.sha256(region.numpy().data).digest()


def send(engine: TransferEngine, region: bytes, counter: bytes, seconds: float) -> Sent:
    """Fills a peer's region with random bytes, counts 1 there, and measures the link.

    Args:
        region: the encoded descriptor.
        counter: the encoded reference of the counter.
        seconds: for all writes.

    Raises:
        FabricError: a write failed or was too slow, or the region hasn't :data:`NBYTES`.
    """
    end = time.monotonic() + seconds
    there = engine.import_region(RegionDescriptor.from_bytes(region))
    if there.nbytes != NBYTES:
        raise FabricError(f"target region: got {there.nbytes} bytes, expected {NBYTES}")
    source = engine.alloc(NBYTES)
    source.numpy()[:] = np.frombuffer(secrets.token_bytes(source.nbytes), dtype=np.uint8)

    def left() -> float:
        return max(0.01, end - time.monotonic())

    engine.write(source, there, imm=CounterRef.from_bytes(counter), timeout=left()).wait()
    trips = []
    for _ in range(_SMALL_WRITES):
        began = time.perf_counter()
        engine.write(source, there, _SMALL_NBYTES, timeout=left()).wait()
        trips.append(time.perf_counter() - began)
    rate = _rate(lambda: engine.write(source, there, timeout=left()), source.nbytes)
    explained = engine.explain(there.peer)
    way = "; ".join(v.reason for v in explained.verdicts if v.chosen)
    return Sent(digest(source), Speed(statistics.median(trips) * 1e6, rate), way)


def _rate(write: Callable[[], Transfer], nbytes: int) -> float:
    """Bytes per second of a stream of writes."""
    under_way: deque[Transfer] = deque()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _MEASURE_S or not done:
        under_way.append(write())
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
            done += 1
    for transfer in under_way:
        transfer.wait()
    return (done + len(under_way)) * nbytes / (time.perf_counter() - began)
