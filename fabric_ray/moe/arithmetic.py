"""How a model computes: as fast as torch can, or with bits that depend on nothing but the numbers.

A matrix product's bits depend on its shape: another number of rows takes another kernel, which adds
in another order; so do an exponential's, for the last elements of a tensor take another path than
those before. :data:`FIXED` is made of sums, differences, products, quotients and roots of single
elements alone. IEEE 754 rounds each of them in one way only, and they are carried out in an order
that the width of a row decides. A row's bits are therefore the same whatever rows are beside it, on
however many threads and machines.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.errors import InvalidArgument

_PRODUCTS = 1 << 21
"""That are held at the same time."""

# exp(x) = 2**n * exp(r), r at most log(2) / 2 (Cephes, expf).
_LOG2E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


class Arithmetic(Protocol):
    """What a model is computed with. Sums and norms are made in float32; results have the dtype of
    their first argument."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[rows, inputs]`` by ``[outputs, inputs]``: ``[rows, outputs]``."""

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor: ...

    def softmax(self, x: Tensor) -> Tensor:
        """Over the last dimension."""

    def total(self, x: Tensor) -> Tensor:
        """The sum over the last dimension."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the last tokens of a sequence.

        Args:
            q: ``[tokens, heads, width]``.
            k: ``[positions, kv heads, width]``, those of ``q`` last.
            v: likewise.

        Returns:
            ``[tokens, heads * width]``.
        """


class TorchMath:
    """Torch's own kernels."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def softmax(self, x: Tensor) -> Tensor:
        return x.softmax(-1)

    def total(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mask = _seen(q.shape[2], k.shape[2], q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class RowInvariantMath:
    """Gives a row the same bits whatever other rows are in the batch. It has no gradients."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        check_no_gradient(x, weight)
        columns = weight.float().t().contiguous()[:, None, :]
        out = x.new_empty(len(x), len(weight))
        at_once = max(1, _PRODUCTS // weight.numel())
        parts = [torch.split(t, at_once) for t in (x.float(), out)]
        for rows, into in zip(*parts, strict=True):
            into.copy_(halved(rows.t()[:, :, None] * columns, 0))
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return (1.0 / (1.0 + exp(-x.float()))).to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (1.0 + exp(-wide))).to(x.dtype)

    def softmax(self, x: Tensor) -> Tensor:
        wide = x.float()
        odds = exp(wide - wide.amax(-1, keepdim=True))
        return (odds / halved(odds, -1)[..., None]).to(x.dtype)

    def total(self, x: Tensor) -> Tensor:
        return halved(x.float(), -1).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        # By a tensor: a GPU multiplies with the reciprocal of a number, which rounds twice.
        width = wide.new_full((), x.shape[-1])
        mean = halved(wide * wide, -1)[..., None] / width
        return weight * (wide / (mean + eps).sqrt()).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_no_gradient(q, k, v)
        tokens, heads, width = q.shape
        shared = heads // k.shape[1]
        keys = k.float().repeat_interleave(shared, 1).permute(2, 1, 0)[:, None]
        values = v.float().repeat_interleave(shared, 1)[:, None]
        seen = _seen(tokens, len(k), q.device)
        at_once = max(1, _PRODUCTS // keys.numel())
        out = q.new_empty(tokens, heads, width)
        parts = [torch.split(t, at_once) for t in (q.float(), seen, out)]
        for queries, visible, into in zip(*parts, strict=True):
            scores = halved(queries.permute(2, 0, 1)[..., None] * keys, 0) * width**-0.5
            visible = visible[:, None]
            peak = scores.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
            odds = exp(scores - peak).masked_fill(~visible, 0.0)
            # What a token doesn't see adds zeros, behind all else: a prompt that is read at once
            # has the bits of one that is read token by token.
            shares = odds / halved(odds, -1)[..., None]
            into.copy_(halved(shares.permute(2, 0, 1)[..., None] * values, 0))
        return out.flatten(1)


FAST: Arithmetic = TorchMath()
FIXED: Arithmetic = RowInvariantMath()


def check_no_gradient(*tensors: Tensor | None) -> None:
    """
    Raises:
        InvalidArgument: gradients of one are wanted, and :data:`FIXED` has none.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InvalidArgument(
            "the fixed arithmetic has no gradients; give arithmetic=FAST (a model: "
            "deterministic=False), or compute under torch.no_grad()"
        )


def halved(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension: its second half is added to its first until one is left.

    The first half is the largest power of two that leaves something, so that zeros at the end
    change nothing.
    """
    n = x.shape[dim]
    while n > 1:
        half = 1 << ((n - 1).bit_length() - 1)
        first, second = x.narrow(dim, 0, half), x.narrow(dim, half, n - half)
        if n == 2 * half:
            x = first + second
        else:
            both = first.narrow(dim, 0, n - half) + second
            x = torch.cat([both, first.narrow(dim, n - half, 2 * half - n)], dim)
        n = half
    # Of zeros only the positive one.
    return x.select(dim, 0) + 0.0


def exp(x: Tensor) -> Tensor:
    """The exponential of float32, within 2 units of the last place; arguments end at -87 and 88."""
    x = x.clamp(-87.0, 88.0)
    n = (x * _LOG2E).round()
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = torch.full_like(r, _EXP[0])
    for coefficient in _EXP[1:]:
        series = series * r + coefficient
    near_one = (series * (r * r) + r) + 1.0
    power = (n.nan_to_num().int() + 127) << 23
    return near_one * power.view(torch.float32)


def _seen(tokens: int, positions: int, device: torch.device) -> Tensor:
    """Which positions each of the last tokens sees."""
    ends = torch.arange(positions - tokens, positions, dtype=torch.int64, device=device)
    return torch.arange(positions, dtype=torch.int64, device=device)[None] <= ends[:, None]
