"""Ranks of a high-throughput exchange, and what must come of their tokens."""

from __future__ import annotations

from typing import Any

import torch

from fabric_ray.moe import RowPart, ThroughputAllToAll
from tests.moe_ranks import ThreadComm, expert, rank_of

HIDDEN = 24
SOURCE = [RowPart("source", 1, torch.int64)]


def throughput_rank(comm: ThreadComm, transport: str = "shm", **options: Any) -> ThroughputAllToAll:
    given = {"hidden": HIDDEN, "chunk": 4, "ring_chunks": 2, "timeout": 60.0, **options}
    one: ThroughputAllToAll = rank_of(ThroughputAllToAll, comm, transport, **given)
    return one


def hierarchical(
    x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, *, local: int, per_node: int, nodes: int
) -> torch.Tensor:
    """Over a rank's experts as the token names them, a node's ranks, the nodes."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for node in range(nodes):
        of_node = torch.zeros_like(total)
        for rank in range(node * per_node, (node + 1) * per_node):
            of_rank = torch.zeros_like(total)
            for t in range(len(x)):
                for k in range(idx.shape[1]):
                    if idx[t, k] >= 0 and idx[t, k] // local == rank:
                        of_rank[t] += w[t, k] * expert(int(idx[t, k]), x[t]).float()
            of_node += of_rank.to(torch.bfloat16).float()
        total += of_node.to(torch.bfloat16).float()
    return total


def layer(
    one: ThroughputAllToAll, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    source = torch.full((len(x), 1), one.rank)
    one.dispatch_send(x, idx, weights=w, source=source)
    got = one.dispatch_recv(multiple=4)
    y = torch.zeros(len(got.x), HIDDEN, dtype=torch.bfloat16)
    for local, number in enumerate(one.local_experts):
        rows = got.of(local)
        y[rows] = expert(number, got.x[rows])
        sources = got.parts["source"][rows].flatten()
        assert torch.equal(sources, sources.sort().values), "not in the order of ranks"
    one.combine_send(y)
    return one.combine_recv(dtype=torch.float32)
