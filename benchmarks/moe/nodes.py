"""The high-throughput exchange as a contender: ranks of two nodes on one machine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe.shape import Batch, Shape, answers
from fabric_ray import TransferEngine
from fabric_ray.moe import RowPart, ThroughputAllToAll

NODES = 2


class Nodes:
    """fabric_ray.moe.ThroughputAllToAll, half of the ranks on each node."""

    def __init__(self, shape: Shape, rank: int, transport: str) -> None:
        self._shape, self._rank, self._turns = shape, rank, 0
        self._engine = TransferEngine(name=f"rank-{rank}", transport=transport)
        self._all = ThroughputAllToAll(
            self._engine,
            rank=rank,
            ranks=shape.ranks,
            ranks_per_node=shape.ranks // NODES,
            experts=shape.experts,
            topk=shape.topk,
            hidden=shape.hidden,
            max_tokens=shape.tokens,
            dtype=torch.float8_e4m3fn,
            parts=[RowPart("scales", shape.scales, torch.float32)],
            timeout=60.0,
        )
        cards: list[bytes | None] = [None] * shape.ranks
        dist.all_gather_object(cards, self._all.card())
        self._all.connect(cards)

    def dispatch(self, given: Batch) -> Tensor:
        self._turns += 1
        self._all.dispatch_send(given.x, given.indices, weights=given.weights, scales=given.scales)
        return self._all.dispatch_recv().x

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        self._all.combine_send(y)
        sums = self._all.combine_recv()
        crossed = self._turns * crossings(self._shape, given, self._rank)[0]
        if self._all.traffic.rail_tokens != crossed:
            raise AssertionError(f"{self._all.traffic}: {crossed} tokens go to the other node")
        return sums

    def close(self) -> None:
        del self._all
        self._engine.close()


def crossings(shape: Shape, given: Batch, rank: int) -> tuple[int, int]:
    """How often a rank's tokens go to the other node: each once, and each once for each expert."""
    per_node = shape.experts // NODES
    own = rank // (shape.ranks // NODES)
    across = given.indices // per_node != own
    return int(across.any(1).sum()), int(across.sum())


def expected(shape: Shape, given: Batch) -> Tensor:
    """The sums, bfloat16 ``[tokens, hidden]``, in the order of the mode."""
    y = answers(given.x, shape.hidden).float()
    rank_of = given.indices // (shape.experts // shape.ranks)
    total = torch.zeros_like(y)
    for node in range(NODES):
        of_node = torch.zeros_like(y)
        for local in range(shape.ranks // NODES):
            mine = rank_of == node * (shape.ranks // NODES) + local
            of_rank = torch.zeros_like(y)
            for k in range(shape.topk):
                here = mine[:, k]
                of_rank[here] += given.weights[here, k : k + 1] * y[here]
            of_node += of_rank.to(torch.bfloat16).float()
        total += of_node.to(torch.bfloat16).float()
    return total.to(torch.bfloat16)
