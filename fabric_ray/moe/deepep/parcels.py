"""The tensors of normal calls: tokens, scales, weights, indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe import rows
from fabric_ray.moe.tokens import Dispatched, RowPart

SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of answers."""
Tokens: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""Tokens ``[tokens, hidden]``, or fp8 ones and their scales."""
AnyTokens: TypeAlias = "Tokens | tuple[Tensor, Tensor, Tensor]"
"""Those, or four-bit ones, their scales, and the scale of each token's scales."""


def pair_of(x: AnyTokens) -> tuple[Tensor, Tensor | None, Callable[[Tokens], AnyTokens]]:
    """Tokens, and all scales of a token in one row; and what gives results the form of ``x``.

    Raises:
        InvalidArgument: ``x`` is something else.
    """
    if not isinstance(x, tuple):
        return x, None, lambda received: received
    tokens, *scales = x
    rows_of = [one.flatten(1) if one.ndim > 1 else one[:, None] for one in scales if one.ndim]
    if len(scales) == len(rows_of) == 1:
        return tokens, rows_of[0], lambda received: _shaped(received, scales)
    if len(scales) != 2 or len(rows_of) != 2:
        raise InvalidArgument(
            f"got {len(x)} tensors for tokens; give tokens, with their scales, and with the scales "
            "of these"
        )
    if any(one.dtype.itemsize != 4 or len(one) != len(tokens) for one in scales):
        given = " and ".join(f"{one.dtype} {tuple(one.shape)}" for one in scales)
        raise InvalidArgument(
            f"scales of four-bit tokens are {given}; give int32 and float32, one row for each of "
            f"{len(tokens)} tokens"
        )
    joined = torch.cat([one.contiguous().view(torch.int32) for one in rows_of], 1)
    return tokens, joined, lambda received: _shaped(received, scales)


def _shaped(received: Tokens, scales: list[Tensor]) -> AnyTokens:
    """Tokens that came, and their scales in the form of those that were sent."""
    tokens, joined = received
    found, at = [tokens], 0
    for one in scales:
        width = one.shape[1:].numel()
        part = joined if width == joined.shape[1] else joined[:, at : at + width].contiguous()
        found.append(part.view(one.dtype).reshape(len(joined), *one.shape[1:]))
        at += width
    return tuple(found)  # type: ignore[return-value]


@dataclass(frozen=True)
class Form:
    """The tensors that an exchange carries."""

    hidden: int
    dtype: torch.dtype
    width: int
    """Most ranks of a token."""
    topk: int = 0
    """Experts that go with a token; 0 for none."""
    weights: bool = False
    scales: int = 0
    scales_dtype: torch.dtype = torch.float32
    origin: bool = False
    """Whether each token carries its int32 number."""
    float32_answers: bool = False
    device: torch.device = field(default=torch.device("cpu"), repr=False)
    """What tokens lie on; ranks needn't agree on it, and say of a form what shows."""

    @property
    def answers(self) -> torch.dtype:
        if self.float32_answers:
            return torch.float32
        return self.dtype if self.dtype in SUMMED else torch.bfloat16

    @property
    def parts(self) -> list[RowPart]:
        parts = []
        if self.topk:
            parts.append(RowPart("topk_idx", self.topk, torch.int64))
        if self.weights:
            parts.append(RowPart("topk_weights", self.topk, torch.float32))
        if self.scales:
            parts.append(RowPart("scales", self.scales, self.scales_dtype))
        if self.origin:
            parts.append(RowPart("origin", 1, torch.int32))
        return parts


def form_of(
    x: Tensor,
    scales: Tensor | None,
    width: int,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    origin: bool = False,
    float32_answers: bool = False,
) -> tuple[Form, dict[str, Tensor]]:
    """What an exchange for these carries, and its parts."""
    if x.ndim != 2:
        raise InvalidArgument(f"tokens are {tuple(x.shape)}; give [tokens, hidden]")
    rows.check_rows("tokens", x, width=x.shape[1], dtype=x.dtype, device=x.device)
    parts: dict[str, Tensor] = {}
    if topk_idx is not None:
        # From 1, for rows of a rank that is lost on the way come as zeros.
        parts["topk_idx"] = topk_idx.to(torch.int64) + 1
    if topk_weights is not None:
        parts["topk_weights"] = topk_weights
        if topk_idx is None or topk_weights.shape != topk_idx.shape:
            raise InvalidArgument(f"weights are {tuple(topk_weights.shape)}; give topk_idx's shape")
        rows.check_rows(
            "weights",
            topk_weights,
            width=topk_weights.shape[1],
            dtype=torch.float32,
            device=x.device,
        )
    if scales is not None:
        if scales.ndim != 2 or len(scales) != len(x) or scales.device != x.device:
            raise InvalidArgument(
                f"scales are {tuple(scales.shape)} on {scales.device} for {len(x)} tokens on "
                f"{x.device}"
            )
        parts["scales"] = scales.contiguous()
    form = Form(
        hidden=x.shape[1],
        dtype=x.dtype,
        width=width,
        topk=0 if topk_idx is None else topk_idx.shape[1],
        weights=topk_weights is not None,
        scales=0 if scales is None else scales.shape[1],
        scales_dtype=torch.float32 if scales is None else scales.dtype,
        origin=origin,
        float32_answers=float32_answers,
        device=x.device,
    )
    return form, parts


def padded(
    got: Dispatched, total: int, first: int, local: int
) -> tuple[Tokens, Tensor | None, Tensor | None]:
    """What came, in ``total`` rows: tokens, this rank's experts and their weights."""

    def fill(tensor: Tensor, byte: int = 0) -> Tensor:
        if len(tensor) == total:
            return tensor
        room = tensor.new_empty(total, tensor.shape[1])
        room[: len(tensor)] = tensor
        room[len(tensor) :].view(torch.uint8).fill_(byte)
        return room

    x = fill(got.x)
    tokens: Tokens = (x, fill(got.parts["scales"])) if "scales" in got.parts else x
    idx = weights = None
    if "topk_idx" in got.parts:
        here = got.parts["topk_idx"] - (1 + first)
        is_here = (here >= 0) & (here < local)
        idx = fill(torch.where(is_here, here, -1), 0xFF)
        if "topk_weights" in got.parts:
            weights = fill(torch.where(is_here, got.parts["topk_weights"], 0.0))
    return tokens, idx, weights
