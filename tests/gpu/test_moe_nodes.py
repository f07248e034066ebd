"""High-throughput exchanges on a GPU: ranks of two nodes, a process each, on one GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.kernels import Device
from fabric_ray.moe import ThroughputAllToAll
from tests.gpu.nodes_rank import HIDDEN, LOCAL, PER_NODE, TOKENS, TOPK, serve
from tests.moe_ranks import batch
from tests.processes import Other
from tests.throughput_ranks import hierarchical

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LIMIT = 120.0


@contextlib.contextmanager
def ranks(transport: str, on_gpu: Sequence[bool]) -> Iterator[list[Other]]:
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(Other(serve, rank, len(on_gpu), transport, gpu))
            for rank, gpu in enumerate(on_gpu)
        ]
        descriptors = [other.hear(LIMIT) for other in others]
        for other in others:
            other.say(descriptors)
        for other in others:
            other.hear(LIMIT)
        yield others


def wanted(seed: int, ranks: int) -> torch.Tensor:
    x, idx, w = batch(seed, TOKENS, ranks * LOCAL, TOPK, HIDDEN)
    nodes = ranks // PER_NODE
    return hierarchical(x, idx, w, local=LOCAL, per_node=PER_NODE, nodes=nodes)


def run(others: Sequence[Other], seed: int) -> None:
    for rank, other in enumerate(others):
        other.say(("run", seed + rank))
    for rank, other in enumerate(others):
        assert torch.equal(other.hear(LIMIT), wanted(seed + rank, len(others)))


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_sums_are_those_of_the_order_bit_by_bit(transport: str) -> None:
    with ranks(transport, [True] * 4) as others:
        began = time.perf_counter()
        for seed in (0, 10, 20):
            run(others, seed)
        print(f"    3 exchanges, {(time.perf_counter() - began) / 3 * 1e3:.1f} ms each")


def test_ranks_on_a_gpu_and_on_the_host_are_one_exchange() -> None:
    with ranks("tcp", [True, False, False, True]) as others:
        run(others, 30)


def test_workers_that_can_not_all_run_at_a_time_are_refused() -> None:
    here = torch.cuda.current_device()
    most = Device(here).resident("moe/work.cu", "work_bf16", 256)
    assert most >= torch.cuda.get_device_properties(here).multi_processor_count

    def one(engine: TransferEngine, workers: int) -> None:
        ranks: dict[str, Any] = {"rank": 0, "ranks": 1, "ranks_per_node": 1}
        sizes: dict[str, Any] = {"experts": 4, "topk": 2, "hidden": HIDDEN, "max_tokens": 8}
        ThroughputAllToAll(engine, **ranks, **sizes, device="cuda", workers=workers)

    with TransferEngine(transport="shm") as engine:
        with pytest.raises(errors.InvalidArgument, match=f"at most {most}"):
            one(engine, most + 1)
        one(engine, min(most, 1024))


@pytest.mark.parametrize("victim", [1, 2])
def test_rs_4_a_rank_that_is_killed_is_named_by_all(victim: int) -> None:
    with ranks("cuda_ipc", [True] * 4) as others:
        run(others, 0)
        left = [other for rank, other in enumerate(others) if rank != victim]
        for other in left:
            other.say(("run", 10))
        others[victim].kill()
        began = time.monotonic()
        for other in left:
            assert f"rank {victim} " in other.hear(LIMIT)
        print(f"    over {time.monotonic() - began:.2f} s after kill -9")
        for other in left:
            assert other.ask(("stop",), LIMIT) == [victim]
