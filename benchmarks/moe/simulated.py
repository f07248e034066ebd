"""Exchanges on simulated NICs: the real protocol, engine and group code on a virtual clock."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec

from benchmarks.contenders import perf
from benchmarks.moe.shape import Shape


class Nic(msgspec.Struct, frozen=True):
    """What a rank's NICs do together. Latencies are an input: the paper prints none."""

    name: str
    gbps: float
    latency_us: float
    paper_post_us: dict[int, float]
    """By ranks: posting all writes of a scatter, p50 (fabric-lib, Table 9)."""


NICS = (
    Nic("ConnectX-7", 400.0, 2.0, {8: 0.842, 16: 1.926, 32: 4.140, 64: 8.502}),
    Nic("EFA", 400.0, 10.0, {8: 3.081, 16: 6.536, 32: 13.374, 64: 27.886}),
)


def simulate(shape: Shape, nic: Nic, *, exchanges: int = 5) -> SimpleNamespace:
    """What `fabric-perf moe` prints: microseconds of virtual time, for posts of real time."""
    numbers = {
        "ranks": shape.ranks,
        "tokens": shape.tokens,
        "experts": shape.experts,
        "topk": shape.topk,
        "row-nbytes": shape.row_nbytes,
        "elements": shape.hidden,
        "private-rows": shape.private_rows,
        "gbps": nic.gbps,
        "latency": int(1e3 * nic.latency_us),
        "exchanges": exchanges,
    }
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    return SimpleNamespace(**json.loads(perf.printed("moe", *options)))
