"""What a CUDA graph needs of calls on a device: the same launches on the same memory, and no wait.

The kernels run on the processor, and so does the graph (:mod:`tests.host_graph`): it keeps what was
launched and computed, refuses whatever reads a value back, and does it all again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fabric_ray.moe import AllToAll, RowPart, cast, device_memory
from fabric_ray.moe.tokens import Outgoing
from tests.host_graph import Graph, Waits
from tests.host_kernels import Host
from tests.moe_ranks import ThreadComm, batch, expert, on_ranks, rank_of, unsharded
from tests.unit.moe.moe_ranks import joined, together

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 2, 4, 2, 16, 6


@contextmanager
def captured(host: Host, **options: Any) -> Iterator[list[tuple[AllToAll, Graph]]]:
    """Ranks, each with a graph for its launches."""
    sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
    graphs = [Graph() for _ in range(RANKS)]
    launchers = [graph.launcher(host.another()) for graph in graphs]
    with joined(launchers, **sizes, **options) as ranks:
        yield list(zip(ranks, graphs, strict=True))


def on_all(ranks: list[tuple[AllToAll, Graph]], work: Callable[[AllToAll, Graph], Any]) -> None:
    together([lambda a=a, g=g: work(a, g) for a, g in ranks])


def answered(a: AllToAll, x: torch.Tensor) -> torch.Tensor:
    """Of all rows that there is room for: each expert's are as far apart."""
    each = RANKS * TOKENS
    parts = [expert(e, x[i * each :][:each]) for i, e in enumerate(a.local_experts)]
    return torch.cat(parts)


def exchanged(
    a: AllToAll, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, out: torch.Tensor
) -> None:
    a.dispatch_send(x, idx)
    got = a.dispatch_recv(stride=RANKS * TOKENS)
    a.combine_send(answered(a, got.x))
    a.combine_recv(w, out=out)


def test_a_captured_dispatch_alone_is_replayed_with_whole_exchanges_between(host: Host) -> None:
    with captured(host) as ranks:

        def work(a: AllToAll, graph: Graph) -> None:
            x, idx, w = batch(a.rank, TOKENS, EXPERTS, TOPK, HIDDEN)
            out = torch.zeros_like(x)
            with graph.capture():
                a.dispatch_send(x, idx)
                got = a.dispatch_recv(stride=RANKS * TOKENS)
            first = [got.x[got.of(i)].clone() for i in range(len(a.local_experts))]
            exchanged(a, x, idx, w, out)
            assert torch.equal(out, unsharded(x, idx, w))
            got.x.zero_()
            graph.replay()
            a.check()
            for i, rows in enumerate(first):
                assert torch.equal(got.x[got.of(i)], rows)

        on_all(ranks, work)


def test_nothing_of_a_device_can_be_asked_for_while_it_is_captured(host: Host) -> None:
    with captured(host) as ranks:

        def work(a: AllToAll, graph: Graph) -> None:
            x, idx, w = batch(a.rank, TOKENS, EXPERTS, TOPK, HIDDEN)
            exchanged(a, x, idx, w, torch.zeros_like(x))
            with graph.capture():
                for asks in (a.check, lambda: a.left_out, a.descriptor):
                    with pytest.raises(Waits):
                        asks()

        on_all(ranks, work)


def test_what_a_captured_dispatch_casts_to_is_kept_when_its_exchange_is_gone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast waits for nothing, so a replay that is too late does it still."""
    monkeypatch.setattr(device_memory, "is_captured", lambda _: True)
    monkeypatch.setattr(device_memory, "_KEPT_FOR_GRAPHS", [])
    launches: list[Callable[[], None]] = []
    kernels = host.another()

    class Replayed:
        def launch(self, *launched: Any, **options: Any) -> None:
            launches.append(lambda: kernels.launch(*launched, **options))
            launches[-1]()

        def resident(self, *of: Any) -> int:
            return kernels.resident(*of)

    x, idx, _ = batch(0, TOKENS, EXPERTS, TOPK, 256)

    def work(comm: ThreadComm) -> tuple[weakref.ref[torch.Tensor], torch.Tensor]:
        sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": 256, "max_tokens": TOKENS}
        parts = [RowPart("scales", 2, torch.float32)]
        dtype, launcher = torch.float8_e4m3fn, Replayed()
        a = rank_of(AllToAll, comm, dtype=dtype, parts=parts, launcher=launcher, **sizes)
        a.dispatch(Outgoing(x, idx, {}, cast.Fp8Form()))
        values = a._steps._cast[0]
        a.close()
        return weakref.ref(values), values.view(torch.uint8).zero_()

    [(kept, written)] = on_ranks(1, work)
    gc.collect()
    assert kept() is not None, "a replay writes to memory that was freed"
    launches[0]()
    assert written.any()
