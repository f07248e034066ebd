"""A rank of a gloo group that a published caller of an exchange runs on."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray.moe import cast
from tests.moe_ranks import batch, expert, unsharded

EXPERTS, TOPK, M = 8, 3, 16
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
MEGATRON = "megatron.core.transformer.moe"


class Rank(SimpleNamespace):
    """This process: its group, and the experts it has."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    store: dist.Store

    @property
    def local(self) -> int:
        return EXPERTS // self.ranks

    @property
    def first(self) -> int:
        return self.rank * self.local

    def batch(self, turn: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        return batch(turn * 8 + self.rank, 5 + (turn + self.rank) % 3, EXPERTS, TOPK, hidden)

    def batched(self, x: Tensor, counts: Tensor) -> Tensor:
        """The experts' answers to ``[local experts, rows, hidden]``; what fills up is NaN."""
        out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
        for number, count in enumerate(counts.tolist()):
            out[number, :count] = expert(self.first + number, x[number, :count])
        return out

    def summed(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        """Sums of the ranks' sums, each of which is rounded on its way."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for rank in range(self.ranks):
            mine = (idx >= 0) & (idx // self.local == rank)
            there = mine.any(1)
            out[there] += unsharded(x, torch.where(mine, idx, -1), w)[there].float()
        return out.to(torch.bfloat16)


def seen(x: Tensor, fp8: bool) -> Tensor:
    return cast.back(*cast.to_fp8(x)) if fp8 else x
