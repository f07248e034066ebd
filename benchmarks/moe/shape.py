"""What is exchanged."""

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
    """A rank's tokens."""

    x: Tensor
    """float8 ``[tokens, hidden]``."""
    scales: Tensor
    """float32 ``[tokens, scales]``."""
    indices: Tensor
    """int64 ``[tokens, topk]``."""
    weights: Tensor
    """float32 ``[tokens, topk]``."""


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


def expected(shape: Shape, given: Batch) -> Tensor:
    """The sums, bfloat16 ``[tokens, hidden]``, in the arithmetic of the exchange."""
    y = answers(given.x, shape.hidden).float()
    total = torch.zeros_like(y)
    for k in range(shape.topk):
        total += given.weights[:, k : k + 1] * y
    return total.to(torch.bfloat16)


def expected_of_nodes(shape: Shape, given: Batch) -> Tensor:
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


def crossings(shape: Shape, given: Batch, rank: int) -> tuple[int, int]:
    """How often a rank's tokens go to the other node: each once, and each once for each expert."""
    per_node = shape.experts // NODES
    own = rank // (shape.ranks // NODES)
    across = given.indices // per_node != own
    return int(across.any(1).sum()), int(across.sum())
