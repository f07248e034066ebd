"""Ranks: processes in which contenders take turns, each timed by the slowest; or simulated ones."""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.contenders import perf
from benchmarks.moe.contenders import make
from benchmarks.moe.shape import NODES, Shape, answers, batch, check, expected
from fabric_ray.bench.child import Child

Times = dict[str, list[tuple[float, float]]]
"""By contender, seconds of dispatch and combine in each turn, of the slowest rank."""

WARM = 2


def measure(shape: Shape, names: list[str], turns: int, *, limit: float = 600.0) -> Times:
    """Every contender in turns, in the same processes.

    Raises:
        ContenderError: a rank has failed, or sums were wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = "benchmarks.moe.ranks:Rank"
        ranks = [
            Child(module, shape, rank, f"{folder}/store", name=f"rank {rank}")
            for rank in range(shape.ranks)
        ]
        try:
            for child in ranks:
                child.end_call()
                child.begin("run", names, turns)
            end = time.monotonic() + limit
            found: list[Times] = [
                child.end_call(max(0.0, end - time.monotonic())) for child in ranks
            ]
            return found[0]
        finally:
            for child in ranks:
                child.kill()


class Rank:
    """A rank's process."""

    def __init__(self, shape: Shape, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._shape, self._rank, self._store = shape, rank, store

    def run(self, names: list[str], turns: int) -> Times:
        shape, rank = self._shape, self._rank
        store = dist.FileStore(self._store, shape.ranks)
        wait = timedelta(seconds=120)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=shape.ranks, timeout=wait
        )
        times: Times = {name: [] for name in names}
        contenders = {name: make(name, shape, rank) for name in names}
        given = batch(shape, rank, 0)
        # By nodes that sums are made in.
        nodes = {name: NODES if name.startswith("nodes ") else 0 for name in names}
        wanted = {count: expected(shape, given, count) for count in set(nodes.values())}
        for turn in range(turns + WARM):
            for name, contender in contenders.items():
                dist.barrier()
                begin = time.perf_counter()
                rows = contender.dispatch(given)
                dispatched = time.perf_counter() - begin
                y = answers(rows, shape.hidden) if name != "floor" else rows
                dist.barrier()
                begin = time.perf_counter()
                sums = contender.combine(y, given)
                both: Any = torch.tensor([dispatched, time.perf_counter() - begin]).double()
                if name != "floor":
                    check(name, shape, sums, wanted[nodes[name]])
                del rows, y, sums
                dist.all_reduce(both, op=dist.ReduceOp.MAX)
                if turn >= WARM:
                    times[name].append((float(both[0]), float(both[1])))
        for contender in contenders.values():
            dist.barrier()
            contender.close()
        dist.barrier()
        dist.destroy_process_group()
        return times


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
    """An exchange on simulated NICs, the real protocol, engine and group code on a virtual clock:
    what `fabric-perf moe` prints, microseconds of virtual time, for posts of real time."""
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
