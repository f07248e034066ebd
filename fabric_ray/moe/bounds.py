"""How far evaluations of a layer may be apart that add up in other orders.

:data:`~fabric_ray.moe.arithmetic.FAST` rounds as torch does: a row's bits depend on what is beside
it, and so a layer on ranks differs from the layer in one place. By how much at most follows from
formats and lengths of sums alone (Higham, Accuracy and Stability of Numerical Algorithms, §3.1):

- a number rounded to a format is off by its unit roundoff ``v`` at most: 2^-24 in float32, 2^-8 in
  bfloat16;
- a sum of ``n`` products made in float32, in any order, fused or not, is off by
  ``n u / (1 - n u)`` times the sum of their magnitudes, ``u`` being 2^-24;
- an exponential, a sigmoid and a silu are right within 8 ``u``.

An error of what goes in adds what it makes of the exact value: through the magnitudes of a matrix,
by 1.1 at most for a silu and a quarter for a sigmoid. All of it is computed here in float64, number
by number, for the tokens that are given.

On a GPU the second rule holds for bfloat16 only without
``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``, which is on by default: with
it, parts of a sum are added in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fabric_ray.moe.layer import MoeConfig, MoeLayer

_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
_U = _UNIT[torch.float32]
_FUNCTION = 8 * _U
"""Of what exponentials, sigmoids and silus come to."""
_SMALLEST = 2.0**-100
"""Below it numbers may be lost: it covers what is subnormal, and where exponentials end."""
_AT_LEAST = 1e-20
"""What :func:`~fabric_ray.moe.layer.route` adds to the sum of weights."""
_SLACK = 1.001
"""For the rounding of the bounds themselves."""


@dataclass(frozen=True)
class Bound:
    """What a layer makes of tokens."""

    sums: Tensor
    """float64 ``[tokens, hidden]``, as if nothing were rounded."""
    error: Tensor
    """float64 ``[tokens, hidden]``: how far an evaluation is from that at most. Two of them, on
    any number of ranks, differ by twice as much at most."""
    settled: Tensor
    """bool ``[tokens]``: whether a token has the same experts in every evaluation, and finite sums.
    Where it hasn't (two experts whose scores are closer than rounding, weights that are lost in
    it, numbers that may overflow), there is no bound."""


def layer_bound(
    layer: MoeLayer, x: Tensor, *, left_out: Collection[int] = (), by_nodes: bool = False
) -> Bound:
    """Bounds what ``layer.forward(x)`` comes to, with any arithmetic and on any number of ranks.

    Args:
        layer: with all its experts.
        x: ``[tokens, hidden]``, the same bits for all that are compared.
        left_out: as for :meth:`MoeLayer.forward`.
        by_nodes: for evaluations over a high-throughput exchange as well, which rounds the sums of
            ranks, and of nodes, to the layer's dtype.
    """
    c, w, dtype = layer.config, layer.weights, layer.config.torch_dtype
    given = _Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))
    scores = _scores(_linear(given, w.router).rounded(torch.float32), c)
    chosen, settled = _chosen(scores, c, w.bias)
    weights = _weights(scores, chosen, c)
    sums = _Bounded.zeros(len(x), c.hidden, device=x.device)
    size = torch.zeros_like(sums.value)
    for expert in {*chosen.flatten().tolist()} - {*left_out}:
        token, place = (chosen == expert).nonzero(as_tuple=True)
        answer = _expert(given.at(token), w.w13[expert], w.w2[expert], dtype)
        term = weights.at((token, place)).column() * answer
        sums.value.index_add_(0, token, term.value)
        sums.error.index_add_(0, token, term.error)
        size.index_add_(0, token, term.most)
    sums = _sum(sums, c.topk + 1, size)
    for _ in range(2 if by_nodes else 0):
        # What is rounded adds up to the sum, and its magnitudes to no more than all terms'.
        sums = _Bounded(sums.value, sums.error + _UNIT[dtype] * (size + sums.error) + _SMALLEST)
    if w.shared_w13 is not None and w.shared_w2 is not None:
        shared = _expert(given, w.shared_w13, w.shared_w2, dtype)
        sums = _Bounded(sums.value + shared.value, sums.error + shared.error).rounded(torch.float32)
    sums = sums.rounded(dtype)
    return Bound(sums.value, _SLACK * sums.error, settled & sums.error.isfinite().all(-1))


@dataclass(frozen=True)
class _Bounded:
    """Numbers, and how far they may be off."""

    value: Tensor
    error: Tensor

    @classmethod
    def zeros(cls, *shape: int, device: torch.device) -> _Bounded:
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2)))

    @property
    def most(self) -> Tensor:
        """Their largest magnitudes."""
        return self.value.abs() + self.error

    def at(self, where: Any) -> _Bounded:
        return _Bounded(self.value[where], self.error[where])

    def column(self) -> _Bounded:
        return _Bounded(self.value[:, None], self.error[:, None])

    def rounded(self, dtype: torch.dtype) -> _Bounded:
        return _finite(self.off(_UNIT[dtype]), self.most, dtype)

    def off(self, relative: float | Tensor) -> _Bounded:
        """With another relative error."""
        return _Bounded(self.value, self.error + relative * self.most + _SMALLEST)

    def __mul__(self, other: _Bounded) -> _Bounded:
        value = self.value * other.value
        return _Bounded(value, self.most * other.most - value.abs())

    def __truediv__(self, other: _Bounded) -> _Bounded:
        """By what is above its error; anything else may give anything."""
        least = other.value - other.error
        sure = least > 0
        value = torch.where(sure, self.value / other.value, 0.0)
        error = (self.error + value.abs() * other.error) / least
        return _Bounded(value, torch.where(sure, error, float("inf")))


def _gamma(n: int) -> float:
    return n * _U / (1 - n * _U)


def _finite(of: _Bounded, size: Tensor, dtype: torch.dtype) -> _Bounded:
    """What may be beyond the format's largest number, or isn't one, may be off by anything."""
    fits = size <= torch.finfo(dtype).max
    return _Bounded(of.value, torch.where(fits, of.error, float("inf")))


def _sum(of: _Bounded, n: int, size: Tensor) -> _Bounded:
    """A sum of ``n`` numbers in float32 whose magnitudes come to ``size``."""
    return _finite(_Bounded(of.value, of.error + _gamma(n) * size), size, torch.float32)


def _linear(x: _Bounded, weight: Tensor) -> _Bounded:
    matrix = weight.double().t()
    size = x.most @ matrix.abs()
    return _sum(_Bounded(x.value @ matrix, x.error @ matrix.abs()), len(matrix), size)


def _expert(x: _Bounded, w13: Tensor, w2: Tensor, dtype: torch.dtype) -> _Bounded:
    both = _linear(x, w13).rounded(dtype)
    half = len(w13) // 2
    gate, up = both.at((slice(None), slice(half))), both.at((slice(None), slice(half, None)))
    silu = (
        _Bounded(gate.value * gate.value.sigmoid(), 1.1 * gate.error).off(_FUNCTION).rounded(dtype)
    )
    return _linear((silu * up).rounded(dtype), w2).rounded(dtype)


def _scores(logits: _Bounded, config: MoeConfig) -> _Bounded:
    if config.score == "sigmoid":
        return _Bounded(logits.value.sigmoid(), 0.25 * logits.error).off(_FUNCTION)
    below = logits.value.amax(-1, keepdim=True) - logits.value
    apart = 2 * logits.error.amax(-1, keepdim=True)
    # The difference from the largest is rounded, exponentials are off, and so is their sum.
    relative = torch.expm1(apart + _U * (below + apart)) + _gamma(logits.value.shape[-1])
    scores = _Bounded(logits.value.softmax(-1), torch.zeros_like(logits.error))
    return scores.off(relative).off(2 * _FUNCTION)


def _chosen(scores: _Bounded, config: MoeConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token, and whether every evaluation chooses them."""
    c, preferred = config, scores
    if bias is not None:
        preferred = _Bounded(scores.value + bias.double(), scores.error).rounded(torch.float32)
    settled = torch.ones(len(scores.value), dtype=torch.bool, device=scores.value.device)
    open_to = torch.ones_like(scores.value, dtype=torch.bool)
    if c.groups > 1:
        each = (len(scores.value), c.groups, c.experts // c.groups)
        grouped = _Bounded(preferred.value.view(each), preferred.error.view(each))
        best = grouped.value.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        group = _Bounded(best, 2 * grouped.error.amax(-1)).rounded(torch.float32)
        kept, settled = _best(group, c.kept_groups)
        open_to = kept[..., None].expand(each).flatten(1)
    shut = torch.where(open_to, preferred.value, float("-inf"))
    chosen, sure = _best(_Bounded(shut, preferred.error), c.topk)
    order = torch.where(chosen, shut, float("-inf")).sort(-1, descending=True).indices
    return order[:, : c.topk], settled & sure


def _best(of: _Bounded, count: int) -> tuple[Tensor, Tensor]:
    """Which are the ``count`` largest, and whether they are whatever the errors are."""
    best = torch.zeros_like(of.value, dtype=torch.bool)
    best.scatter_(-1, of.value.sort(-1, descending=True).indices[:, :count], True)
    least = (of.value - of.error).masked_fill(~best, float("inf")).amin(-1)
    rest = (of.value + of.error).masked_fill(best, float("-inf")).amax(-1)
    return best, least > rest


def _weights(scores: _Bounded, chosen: Tensor, config: MoeConfig) -> _Bounded:
    weights = _Bounded(scores.value.gather(-1, chosen), scores.error.gather(-1, chosen))
    if config.normalise:
        error = weights.error.sum(-1) + _AT_LEAST
        total = _Bounded(weights.value.sum(-1), error).off(_gamma(config.topk + 1))
        weights = (weights / total.column()).rounded(torch.float32)
    scaled = _Bounded(weights.value * config.scale, weights.error * abs(config.scale))
    # The scale is rounded, too.
    return scaled.off(2 * _U)
