"""What is exchanged, and the sums that come of it."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

NODES = 2


class Shape(msgspec.Struct, frozen=True):
    """A model's exchange; DeepSeek-V3's if nothing else is said (fabric-lib §7.4.3)."""

    ranks: int
    tokens: int
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    block: int = 128
    """Elements to a scale."""
    private_rows: int = 32

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return self.hidden // self.block

    @property
    def row_nbytes(self) -> int:
        """A token in fp8, with its scales."""
        return self.hidden + 4 * self.scales

    @property
    def back_nbytes(self) -> int:
        """An answer in bf16."""
        return 2 * self.hidden

    @property
    def rows(self) -> int:
        """Rows that a rank sends, and on average receives."""
        return self.tokens * self.topk

    def nbytes(self, contenders: int) -> int:
        """What a benchmark of all ranks takes at most, roughly: an exchange of ours for each
        contender, buffers of the floor, and gloo's or torch's copies while it is its turn."""
        answers = self.rows * self.back_nbytes
        return self.ranks * (int(2.5 * answers) * contenders + 2 * answers + 4 * answers + 2**28)


class Batch(msgspec.Struct):
    """A rank's tokens: float8 ``x [tokens, hidden]``, float32 ``scales [tokens, scales]``, int64
    ``indices [tokens, topk]`` of experts, and their float32 ``weights``."""

    x: Tensor
    scales: Tensor
    indices: Tensor
    weights: Tensor


def batch(shape: Shape, rank: int, turn: int) -> Batch:
    """The same for every contender."""
    g = torch.Generator().manual_seed(turn * 1009 + rank)
    x = torch.randn(shape.tokens, shape.hidden, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(shape.tokens, shape.scales, generator=g)
    indices = torch.rand(shape.tokens, shape.experts, generator=g).topk(shape.topk, dim=1).indices
    return Batch(x, scales, indices, torch.rand(shape.tokens, shape.topk, generator=g))


def answers(rows: Tensor, hidden: int) -> Tensor:
    """What experts make of fp8 rows here: each byte as a number, known and quick."""
    return rows[:, :hidden].view(torch.uint8).to(torch.bfloat16)


def expected(shape: Shape, given: Batch, nodes: int = 0) -> Tensor:
    """The sums, bfloat16 ``[tokens, hidden]``, in the arithmetic of the exchange: of all experts
    in their order, or first of each rank and then of each of so many nodes."""
    y = answers(given.x, shape.hidden).float()
    total = torch.zeros_like(y)
    if not nodes:
        for k in range(shape.topk):
            total += given.weights[:, k : k + 1] * y
        return total.to(torch.bfloat16)
    rank_of = given.indices // (shape.experts // shape.ranks)
    per_node = shape.ranks // nodes
    for node in range(nodes):
        of_node = torch.zeros_like(y)
        for rank in range(node * per_node, (node + 1) * per_node):
            of_rank = torch.zeros_like(y)
            for k in range(shape.topk):
                here = rank_of[:, k] == rank
                of_rank[here] += given.weights[here, k : k + 1] * y[here]
            of_node += of_rank.to(torch.bfloat16).float()
        total += of_node.to(torch.bfloat16).float()
    return total.to(torch.bfloat16)


def check(name: str, shape: Shape, sums: Tensor, want: Tensor) -> None:
    """Every bit of the sums.

    Raises:
        AssertionError: they are others.
    """
    if not torch.equal(sums, want):
        wrong = int((sums != want).any(dim=1).sum())
        raise AssertionError(f"{name}: {wrong} of {shape.tokens} sums are wrong")


def crossings(shape: Shape, given: Batch, rank: int) -> tuple[int, int]:
    """How often a rank's tokens go to the other node: each once, and each once for each expert."""
    per_node = shape.experts // NODES
    own = rank // (shape.ranks // NODES)
    across = given.indices // per_node != own
    return int(across.any(1).sum()), int(across.sum())
