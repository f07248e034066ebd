"""Ranks as processes: each contender's turns, timed by the slowest rank."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.moe.shape import Shape, answers, batch, expected, expected_of_nodes
from benchmarks.moe.ways import check, make

Times = dict[str, list[tuple[float, float]]]
"""By contender, seconds of dispatch and combine in each turn, of the slowest rank."""

WARM = 2


def measure(shape: Shape, names: list[str], turns: int, *, limit: float = 600.0) -> Times:
    """Every contender in turns, in the same processes.

    Raises:
        RuntimeError: a rank has failed, or sums were wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = []
        for rank in range(shape.ranks):
            args = (shape, names, turns, rank, folder)
            ranks.append(context.Process(target=_rank, args=args, daemon=True))
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            ended = [p.exitcode for p in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(code != 0 for code in ended):
            raise RuntimeError(f"ranks ended with {ended}; None is one that took over {limit} s")
        times: Times = torch.load(Path(folder) / "times")
        return times


def _rank(shape: Shape, names: list[str], turns: int, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), shape.ranks)
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.ranks, timeout=wait)
    times: Times = {name: [] for name in names}
    ways = {name: make(name, shape, rank) for name in names}
    given = batch(shape, rank, 0)
    makers = {n: expected_of_nodes if n.startswith("nodes ") else expected for n in names}
    made = {maker: maker(shape, given) for maker in set(makers.values())}
    for turn in range(turns + WARM):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            rows = way.dispatch(given)
            dispatched = time.perf_counter() - begin
            y = answers(rows, shape.hidden) if name != "floor" else rows
            dist.barrier()
            begin = time.perf_counter()
            sums = way.combine(y, given)
            combined = time.perf_counter() - begin
            check(name, shape, sums, made[makers[name]])
            del rows, y, sums
            both: Any = torch.tensor([dispatched, combined], dtype=torch.float64)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            if turn >= WARM:
                times[name].append((float(both[0]), float(both[1])))
    for way in ways.values():
        dist.barrier()
        way.close()
    if rank == 0:
        torch.save(times, Path(folder) / "times")
    dist.barrier()
    dist.destroy_process_group()
