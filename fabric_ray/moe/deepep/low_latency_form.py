"""What low-latency calls of a shape are made for, and what they add to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.moe import cast
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.rows import check_statistics
from fabric_ray.moe.tokens import RowPart

BLOCK = 128
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    """What the exchanges of a shape are made for."""

    max_tokens: int
    hidden: int
    experts: int
    topk: int
    scales: torch.dtype | None
    """``None`` for tokens in bfloat16, e4m3 for tokens in four bits."""
    device: torch.device = HOST
    """What tokens lie on."""

    @property
    def four_bits(self) -> bool:
        return self.scales == torch.float8_e4m3fn

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens on their way."""
        if self.scales is None:
            return torch.bfloat16
        return torch.uint8 if self.four_bits else torch.float8_e4m3fn

    @property
    def width(self) -> int:
        """Elements of a token on its way."""
        return self.hidden // 2 if self.four_bits else self.hidden

    @property
    def block(self) -> int:
        """Elements of a token for one element of its scales."""
        if self.four_bits:
            return cast.FP4_BLOCK
        return BLOCK * (cast.PACKED if self.scales == torch.int32 else 1)

    @property
    def parts(self) -> list[RowPart]:
        origin = [RowPart("source", 1, torch.int32), RowPart("number", 1, torch.int32)]
        if self.scales is None:
            return origin
        return [*origin, RowPart("scales", self.hidden // self.block, self.scales)]


@dataclass(frozen=True)
class Statistics:
    """What calls add to."""

    counts: Tensor | None
    """int32 ``[local experts]``: tokens that came."""
    waits: Tensor | None
    """int64 ``[ranks]``: nanoseconds of waiting for each rank."""

    def check(self, ranks: int, form: Form, on_device: bool) -> None:
        """
        Raises:
            InvalidArgument: a tensor doesn't match.
            Unsupported: waits of a device.
        """
        if self.waits is not None and on_device:
            raise Unsupported(
                "waits are measured on the host alone; leave wait_recv_cost_stats out on a GPU"
            )
        if self.counts is not None:
            check_statistics(self.counts, form.experts // ranks, torch.int32, form.device)
        if self.waits is not None:
            check_statistics(self.waits, ranks, torch.int64, form.device)

    def add(self, counts: Tensor | None, exchange: AllToAll) -> None:
        """Adds the counts, and what the exchange's last call waited."""
        if self.counts is not None and counts is not None:
            self.counts.add_(counts)
        if self.waits is not None:
            self.waits.add_(torch.tensor(exchange.wait_times, dtype=torch.int64, device="cpu"))


def check_tokens(x: Tensor, topk_idx: Tensor, form: Form) -> None:
    """Raises :class:`InvalidArgument` for what can't be dispatched."""
    if x.ndim != 2 or x.dtype != torch.bfloat16:
        raise InvalidArgument(
            f"tokens are {x.dtype} {tuple(x.shape)}; give bfloat16 [tokens, hidden]"
        )
    if topk_idx.ndim != 2 or len(topk_idx) != len(x):
        raise InvalidArgument(
            f"indices are {tuple(topk_idx.shape)} for {len(x)} tokens; give one row for each"
        )
    if len(x) > form.max_tokens:
        raise InvalidArgument(
            f"{len(x)} tokens, and there is room for {form.max_tokens}; send fewer at a time, or "
            "raise num_max_dispatch_tokens_per_rank"
        )
    if topk_idx.device != x.device:
        raise InvalidArgument(
            f"indices lie on {topk_idx.device}, tokens on {x.device}; move one of them"
        )
    if form.scales is not None and form.hidden % form.block:
        raise InvalidArgument(
            f"{form.hidden} elements of a token aren't blocks of {form.block}, one for an element "
            f"of {form.scales} scales; bfloat16 takes any: use_fp8=False, use_nvfp4=False"
        )
