"""Calls of familiar faces in CUDA graphs, whose replays need the exchanges of the capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray import errors
from fabric_ray.moe import cast, device_memory, nixl_ep
from fabric_ray.moe.deepep import Buffer, ElasticBuffer, EventHandle, HybridEPBuffer, shared_calls
from fabric_ray.moe.deepep import buffer as deepep_buffer
from fabric_ray.moe.deepep.hybrid import indices_to_map
from tests.host_graph import Graph
from tests.host_kernels import Host
from tests.moe_ranks import ThreadComm, batch, on_all_ranks

EXPERTS, EACH, TOPK, M, HIDDEN = 6, 2, 2, 5, 512
Capture: TypeAlias = Callable[[], Any]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A capture of the calls of this thread."""
    threads: set[int] = set()
    for where in (device_memory, shared_calls):
        monkeypatch.setattr(where, "is_captured", lambda _: threading.get_ident() in threads)

    @contextmanager
    def capture() -> Iterator[None]:
        threads.add(threading.get_ident())
        yield
        threads.discard(threading.get_ident())

    return capture


def low_latency(buffer: Any, rank: int, experts: int = EXPERTS) -> None:
    x, idx, w = batch(rank, M, experts, TOPK, HIDDEN)
    rows, _, handle, *_ = buffer.low_latency_dispatch(x, idx, M, experts, use_fp8=False)
    buffer.low_latency_combine(rows, idx, w, handle)


def joined(host: Host, rank: int, store: Any, ranks: range) -> nixl_ep.Buffer:
    buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store, launcher=host.another())
    buffer.update_memory_buffers(3, EACH, 0)
    buffer.connect_ranks(ranks)
    return buffer


def on_threads(ranks: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))


def test_no_rank_joins_while_a_graph_of_any_rank_has_calls(host: Host, captured: Capture) -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        if rank == 2:
            with pytest.raises(errors.HandshakeError, match="rank 1 could not take part: CUDA"):
                joined(host, rank, store, range(3))
            return
        buffer = joined(host, rank, store, range(2))
        with captured() if rank else nullcontext():
            low_latency(buffer, rank, 2 * EACH)
        refusal: Any = errors.Unsupported if rank else errors.HandshakeError
        with pytest.raises(refusal, match=r"graphs of ranks \[1\] have calls"):
            buffer.connect_ranks([2], activate=False)
        low_latency(buffer, rank, 2 * EACH)
        buffer.destroy()

    on_threads(3, work)


def test_a_rank_that_joined_takes_no_part_while_a_graph_has_calls_without_it(
    host: Host, captured: Capture
) -> None:
    store, met = dist.HashStore(), threading.Barrier(2)

    def work(rank: int) -> None:
        buffer = joined(host, rank, store, range(rank + 1))
        if not rank:
            low_latency(buffer, rank, EACH)
            buffer.connect_ranks([1], activate=False)
            with captured():
                low_latency(buffer, rank, EACH)
            with pytest.raises(errors.Unsupported, match=r"graphs of ranks \[0\] have calls"):
                buffer.update_mask_buffer(1, mask=False)
            low_latency(buffer, rank, EACH)
        met.wait(60)
        buffer.destroy()

    on_threads(2, work)


def test_calls_of_a_rank_alone_that_a_graph_has_are_not_those_with_others(
    host: Host, captured: Capture
) -> None:
    store, status = dist.HashStore(), torch.empty(2, dtype=torch.int32)

    def work(rank: int) -> None:
        buffer = joined(host, rank, store, range(2))
        buffer.update_mask_buffer(1 - rank, mask=True)
        with captured():
            low_latency(buffer, rank, 2 * EACH)
        for take_back in (
            lambda: buffer.update_mask_buffer(1 - rank, mask=False),
            buffer.clean_mask_buffer,
        ):
            with pytest.raises(errors.Unsupported, match=f"graphs of ranks .{rank}. have calls"):
                take_back()
        if not rank:
            buffer.query_mask_buffer(status)
            assert status.tolist() == [0, 1]
        low_latency(buffer, rank, 2 * EACH)
        buffer.destroy()

    on_threads(2, work)


@on_all_ranks(1)
def test_a_dispatch_that_waits_for_a_device_is_refused_before_anything_is_launched(
    comm: ThreadComm, host: Host, captured: Capture
) -> None:
    graph = Graph()
    launcher = graph.launcher(host.another())
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M, launcher=launcher)
    x, idx, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
    hybrid = HybridEPBuffer(comm, HIDDEN, M, EXPERTS, launcher=launcher)
    routes, probs = indices_to_map(idx, w, M, EXPERTS)
    permuted = {"routing_map": routes, "probs": probs, "num_permuted_tokens": M * TOPK}

    def forward(expand: bool) -> Tensor:
        rows, _, _, handle, _ = buffer.dispatch(
            x, idx, w, num_experts=EXPERTS, do_cpu_sync=False, do_expand=expand
        )
        assert isinstance(rows, Tensor)
        sums, _, _ = buffer.combine(rows, handle)
        return sums

    for expand in (False, True):
        sums = forward(expand)
        with captured(), graph.capture():
            with pytest.raises(errors.Unsupported, match="do_cpu_sync=False"):
                forward(expand)
            with pytest.raises(errors.Unsupported, match="non_blocking=True"):
                hybrid.dispatch_with_permute(hidden=x, non_blocking=True, **permuted)
        assert graph.size == 0
        assert torch.equal(forward(expand), sums)
    # By a handle the number is known.
    rows, *_, handle, _ = buffer.dispatch(x, idx, num_experts=EXPERTS, do_cpu_sync=False)
    assert isinstance(rows, Tensor)
    buffer.combine(rows, handle)
    repeated, *_ = buffer.dispatch(x, handle=handle)  # makes the exchange
    assert isinstance(repeated, Tensor)
    buffer.combine(repeated, handle)
    with captured(), graph.capture():
        again, *_ = buffer.dispatch(x, handle=handle)
        assert isinstance(again, Tensor)
        sums, _, _ = buffer.combine(again, handle)
    graph.replay()
    buffer.check()
    assert torch.equal(again, rows)
    buffer.destroy()
    hybrid.destroy()


def forth_and_back(buffer: Buffer, tokens: int) -> tuple[Tensor, Any, Tensor, Tensor]:
    """A rank's tokens in normal calls, the handle, the rows that came, and sums."""
    x, idx, w = batch(buffer.rank, tokens, EXPERTS, TOPK, HIDDEN)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
    assert isinstance(rows, Tensor)
    sums, *_ = buffer.combine(rows, handle)
    return x, handle, rows, sums


def once_more(buffer: Buffer, x: Tensor, handle: Any) -> tuple[Tensor, Tensor]:
    """Rows and sums by a handle."""
    rows, *_ = buffer.dispatch(x, handle=handle)
    assert isinstance(rows, Tensor)
    sums, *_ = buffer.combine(rows, handle)
    return rows, sums


@on_all_ranks(2)
def test_replays_go_on_when_buffers_have_grown(
    comm: ThreadComm, host: Host, captured: Capture
) -> None:
    graph = Graph()
    buffer = Buffer(comm=comm, launcher=graph.launcher(host.another()))

    x, handle, rows, wanted = forth_and_back(buffer, M)
    once_more(buffer, x, handle)  # makes the exchange
    with captured(), graph.capture():
        repeated, sums = once_more(buffer, x, handle)
    graph.replay()
    buffer.check()
    assert torch.equal(sums, wanted)
    forth_and_back(buffer, 200)
    x.neg_()
    comm.all_gather(b"")
    graph.replay()
    buffer.check()
    assert torch.equal(repeated, -rows)
    assert torch.equal(sums, -wanted)
    buffer.destroy()


@on_all_ranks(2)
def test_buffers_do_not_grow_when_graphs_of_some_ranks_have_calls(
    comm: ThreadComm, host: Host, captured: Capture
) -> None:
    """One rank replays, the other one makes the calls; larger buffers would part them."""
    graph = Graph()
    buffer = Buffer(comm=comm, launcher=graph.launcher(host.another()))
    x, handle, _, wanted = forth_and_back(buffer, M)
    once_more(buffer, x, handle)  # makes the exchange
    alone = comm.rank() == 0
    with captured() if alone else nullcontext(), graph.capture() if alone else nullcontext():
        _, sums = once_more(buffer, x, handle)
    for _ in range(2):
        comm.all_gather(b"")
        if alone:
            graph.replay()
        else:
            _, sums = once_more(buffer, x, handle)
        buffer.check()
        assert torch.equal(sums, wanted)
        with pytest.raises(errors.Unsupported, match=r"graphs of ranks \[0\]"):
            forth_and_back(buffer, 200)
    buffer.destroy()


class Placed:
    """A launcher that notes behind which steps of a graph it launches."""

    def __init__(self, graph: Graph, host: Host) -> None:
        self._graph, self._under, self.at = graph, graph.launcher(host.another()), 0

    def launch(self, *launched: Any, **options: Any) -> None:
        self.at = self._graph.size
        self._under.launch(*launched, **options)

    def resident(self, *of: Any) -> int:
        return self._under.resident(*of)


@pytest.mark.parametrize("fp8", [False, True])
def test_results_with_room_for_more_ranks_are_filled_by_the_call(
    fp8: bool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may run on another stream, and an event may be waited for by one: what is launched
    for results stands before the place that they mark."""
    graph, marks = Graph(), list[int]()
    launcher = Placed(graph, host)

    class Event(EventHandle):
        def __init__(self) -> None:
            marks.append(graph.size)
            super().__init__()

    monkeypatch.setattr(deepep_buffer, "EventHandle", Event)
    buffer = nixl_ep.Buffer(rank=0, tcp_store_group=dist.HashStore(), launcher=launcher)
    buffer.update_memory_buffers(3, EACH, 0)
    buffer.connect_ranks([0])
    x, idx, w = batch(0, M, EACH, TOPK, HIDDEN)

    def dispatch(**options: Any) -> Any:
        return buffer.dispatch(x, idx, M, 3 * EACH, use_fp8=fp8, **options)

    def combine(got: Any, handle: Any) -> None:
        rows = cast.back(*got) if fp8 else got
        assert rows.shape == (EACH, 3 * M, HIDDEN)
        out, _, _ = buffer.combine(rows, idx, w, handle)
        seen = cast.back(*cast.to_fp8(x)) if fp8 else x
        wanted = (seen.float() * torch.where(idx < 0, 0.0, w).sum(1, keepdim=True)).to(out.dtype)
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)

    for _ in range(2):
        got, _, handle, _, _ = dispatch()  # makes the exchanges
        combine(got, handle)
    with graph.capture():
        got, _, handle, _, hook = dispatch(return_recv_hook=True)
        assert graph.size == launcher.at + 1, "something follows the launch that the hook marks"
        hook()
    combine(got, handle)
    with graph.capture():
        got, _, handle, _, _ = dispatch(async_finish=True)
        assert marks == [graph.size], "something follows the event"
    combine(got, handle)
    buffer.destroy()
