"""Exchanges on simulated NICs: the real protocol, engine and group code on a virtual clock."""

from __future__ import annotations

import subprocess

import msgspec

from benchmarks.contenders.perf import find_program
from benchmarks.moe.shape import Shape


class Simulated(msgspec.Struct, frozen=True):
    """Microseconds of virtual time; of ``post`` of real time."""

    dispatch_p50_us: float
    dispatch_max_us: float
    combine_p50_us: float
    combine_max_us: float
    dispatch_floor_us: float
    combine_floor_us: float
    """Bytes over the busiest port, and one way."""
    post_p50_us: float


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


def simulate(shape: Shape, *, gbps: float, latency_us: float, exchanges: int = 5) -> Simulated:
    """One case.

    Raises:
        RuntimeError: ``fabric-perf`` isn't built, or has failed.
    """
    program = find_program()
    if program is None:
        raise RuntimeError("fabric-perf is missing; build it: make bench does")
    numbers = {
        "ranks": shape.ranks,
        "tokens": shape.tokens,
        "experts": shape.experts,
        "topk": shape.topk,
        "row-nbytes": shape.row_nbytes,
        "elements": shape.hidden,
        "private-rows": shape.private_rows,
        "gbps": gbps,
        "latency": int(1e3 * latency_us),
        "exchanges": exchanges,
    }
    command = [str(program), "moe"]
    for name, value in numbers.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"fabric-perf moe: {done.stderr.strip()}")
    return msgspec.json.decode(done.stdout, type=Simulated)
