"""A rank of a gloo group that a published caller of an exchange runs on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray.moe import cast
from tests.adapters.sources import module, run
from tests.moe_ranks import batch, expert, unsharded

EXPERTS, TOPK, M = 8, 3, 16
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
MEGATRON = "megatron.core.transformer.moe"
FOUR_BITS = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"


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


def vllm_four_bits() -> dict[str, Any]:
    """vLLM's references of casts to four bits and back."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    given = {
        "torch": torch,
        "FLOAT4_E2M1_MAX_RECIPROCAL": 1 / 6.0,
        "kE2M1ToFloat_handle": SimpleNamespace(val=values),
    }
    return run(
        module(FOUR_BITS, ""), given, "ref_nvfp4_quant", "cast_to_fp4", "get_reciprocal",
        "break_fp4_bytes", "convert_swizzled_to_linear", "dequantize_to_dtype",
    )  # fmt: skip


def from_four_bits(x: Tensor, tiles: Tensor, scale: Tensor) -> Tensor:
    """Tokens ``[experts, rows, hidden / 2]`` and their scales in tiles, as vLLM reads them."""
    back = vllm_four_bits()["dequantize_to_dtype"]
    by_expert = tiles.permute(5, 2, 4, 0, 1, 3)
    assert by_expert.is_contiguous()
    each = [
        back(one, of.reshape(-1), 1 / scale, torch.bfloat16)
        for one, of in zip(x, by_expert, strict=True)
    ]
    return torch.stack(each)


def through_four_bits(x: Tensor, scale: Tensor) -> Tensor:
    values, scales = vllm_four_bits()["ref_nvfp4_quant"](x, scale, 16)
    wide = (scales * (1 / scale)).repeat_interleave(16, 1)
    return (values * wide).to(torch.bfloat16)


def seen(x: Tensor, fp8: bool) -> Tensor:
    return cast.back(*cast.to_fp8(x)) if fp8 else x
