"""The contenders: one exchange each, in two halves that are timed apart."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe.shape import NODES, Batch, Shape, crossings
from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll, RowPart, ThroughputAllToAll


class Contender(Protocol):
    """On one rank."""

    def dispatch(self, given: Batch) -> Tensor:
        """Tokens out and in; the rows for this rank's experts, in their order."""

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        """Answers out and in; the sums."""

    def close(self) -> None: ...


class Ours:
    """fabric_ray.moe.AllToAll."""

    def __init__(self, shape: Shape, rank: int, transport: str) -> None:
        self._shape, self._rank = shape, rank
        self._engine = TransferEngine(name=f"rank-{rank}", transport=transport)
        self._all = self._made(
            rank=rank,
            ranks=shape.ranks,
            experts=shape.experts,
            topk=shape.topk,
            hidden=shape.hidden,
            max_tokens=shape.tokens,
            dtype=torch.float8_e4m3fn,
            parts=[RowPart("scales", shape.scales, torch.float32)],
            timeout=60.0,
        )
        descriptors: list[bytes | None] = [None] * shape.ranks
        dist.all_gather_object(descriptors, self._all.descriptor())
        self._all.connect(descriptors)

    def _made(self, **common: Any) -> Any:
        # Half as many again as come on average: what is more comes in turns.
        rows = {"private_rows": self._shape.private_rows, "shared_rows": self._shape.rows * 3 // 2}
        return AllToAll(self._engine, **rows, **common)

    def dispatch(self, given: Batch) -> Tensor:
        self._all.dispatch_send(given.x, given.indices, scales=given.scales)
        return self._all.dispatch_recv().x

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        self._all.combine_send(y)
        return self._all.combine_recv(given.weights)

    def close(self) -> None:
        self._engine.close()


class Nodes(Ours):
    """fabric_ray.moe.ThroughputAllToAll, half of the ranks on each node."""

    _exchanges = 0

    def _made(self, **common: Any) -> Any:
        per_node = self._shape.ranks // NODES
        return ThroughputAllToAll(self._engine, ranks_per_node=per_node, **common)

    def dispatch(self, given: Batch) -> Tensor:
        self._exchanges += 1
        self._all.dispatch_send(given.x, given.indices, weights=given.weights, scales=given.scales)
        return self._all.dispatch_recv().x

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        self._all.combine_send(y)
        sums = self._all.combine_recv()
        crossed = self._exchanges * crossings(self._shape, given, self._rank)[0]
        if self._all.traffic.rail_tokens != crossed:
            raise AssertionError(f"{self._all.traffic}: {crossed} tokens go to the other node")
        return sums

    def close(self) -> None:
        del self._all
        super().close()


class Gloo:
    """torch.distributed's all_to_all over gloo: counts, then rows, packed and sorted."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def dispatch(self, given: Batch) -> Tensor:
        s = self._shape
        flat = given.indices.flatten()
        self._order = flat.argsort(stable=True)
        out_counts = torch.bincount(flat, minlength=s.experts)
        in_counts = torch.empty_like(out_counts)
        dist.all_to_all_single(in_counts, out_counts)
        tokens = torch.cat([given.x.view(torch.uint8), given.scales.view(torch.uint8)], dim=1)
        packed = tokens[self._order // s.topk]
        self._out = out_counts.view(s.ranks, -1).sum(1).tolist()
        by_source = in_counts.view(s.ranks, -1)
        self._in = by_source.sum(1).tolist()
        rows = torch.empty(sum(self._in), s.row_nbytes, dtype=torch.uint8)
        dist.all_to_all_single(rows, packed, self._in, self._out)
        del packed
        expert = torch.arange(by_source.shape[1]).repeat(s.ranks)
        self._sorted = expert.repeat_interleave(by_source.flatten()).argsort(stable=True)
        return rows[self._sorted]

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        s = self._shape
        back = torch.empty_like(y)
        back[self._sorted] = y
        got = torch.empty(sum(self._out), s.hidden, dtype=torch.bfloat16)
        dist.all_to_all_single(got, back, self._out, self._in)
        del back
        rows = torch.empty_like(got)
        rows[self._order] = got
        total = torch.zeros(len(given.x), s.hidden)
        for k in range(s.topk):
            total += given.weights[:, k : k + 1] * rows[k :: s.topk].float()
        return total.to(torch.bfloat16)

    def close(self) -> None: ...


class Floor:
    """What has to be moved once, copied once in this process: no exchange is quicker."""

    def __init__(self, shape: Shape) -> None:
        self._tokens = shape.rows * shape.row_nbytes
        self._from = torch.zeros(shape.rows * shape.back_nbytes, dtype=torch.uint8)
        self._to = torch.ones_like(self._from)

    def dispatch(self, given: Batch) -> Tensor:
        return self._to[: self._tokens].copy_(self._from[: self._tokens])

    def combine(self, y: Tensor, given: Batch) -> Tensor:
        return self._to.copy_(self._from)

    def close(self) -> None: ...


def make(name: str, shape: Shape, rank: int) -> Contender:
    """A contender by name: ``shm``, ``tcp``, ``nodes shm``, ``nodes tcp``, ``gloo``, ``floor``."""
    if name in ("gloo", "floor"):
        return Gloo(shape) if name == "gloo" else Floor(shape)
    mode, _, transport = name.rpartition(" ")
    return (Nodes if mode else Ours)(shape, rank, transport)
