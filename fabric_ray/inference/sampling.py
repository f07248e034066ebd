"""From logits to a token, the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from fabric_ray.inference.errors import InferenceError, NonFiniteLogits

_BITS = 53
"""Of a double's mantissa: every draw is exact."""


class Sampling(msgspec.Struct, frozen=True):
    """How a request's tokens are chosen.

    Raises:
        InferenceError: a value is out of range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """The likeliest tokens that together have this probability are drawn from; above 0, at most
    1."""
    seed: int = 0
    """Of all draws of the request."""
    top_k: int = 0
    """So many of the likeliest tokens are drawn from; 0 for all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are not drawn; 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InferenceError(f"temperature is {self.temperature}; give 0 to 100")
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p is {self.top_p}; give more than 0 and at most 1")
        if self.top_k < 0:
            raise InferenceError(f"top_k is {self.top_k}; give at least 1, or 0 for all tokens")
        if not 0 <= self.min_p <= 1:
            raise InferenceError(f"min_p is {self.min_p}; give 0 to 1")


def sample(logits: Tensor, sampling: Sampling, index: int, *, barred: Collection[int] = ()) -> int:
    """A token by its logits.

    A draw depends on the seed and on ``index`` alone, so that a request may move to another machine
    between two tokens. Sums are made in float64 and ties go to the lower token. ``top_k`` and
    ``min_p`` go before ``top_p``, which is a share of what they leave.

    Args:
        logits: ``[vocab]``, of any dtype.
        sampling: the request's choice.
        index: how many tokens the request has generated so far.
        barred: tokens that can't be chosen.

    Raises:
        NonFiniteLogits: a logit is NaN, or the largest is infinite.
    """
    values: np.ndarray[Any, np.dtype[np.float64]] = logits.detach().double().cpu().numpy()
    if barred:
        values = values.copy()
        values[[token for token in barred if token < len(values)]] = -np.inf
    _check_largest(values.max())
    if sampling.temperature == 0:
        return int(values.argmax())
    odds = np.exp((values - values.max()) / sampling.temperature)
    if sampling.top_p == 1 and not sampling.top_k and not sampling.min_p:
        return int(_drawn(odds, sampling.seed, index))
    order = np.argsort(-odds, kind="stable")
    count = min(sampling.top_k or len(order), len(order))
    if sampling.min_p:
        count = min(count, int((odds >= sampling.min_p).sum()))
    sums = odds[order[:count]].cumsum()
    # The first whose sum reaches top_p is the last to be drawn from.
    last = int(np.searchsorted(sums, sampling.top_p * sums[-1]))
    return int(order[_drawn(odds[order[: min(last + 1, count)]], sampling.seed, index)])


def check_finite(logits: Tensor) -> None:
    """Refuses logits that :func:`sample` can't choose from.

    Raises:
        NonFiniteLogits: a logit is NaN, or the largest is infinite.
    """
    _check_largest(float(logits.detach().max()))


def _check_largest(logit: float) -> None:
    """The maximum is NaN where any value is."""
    if not math.isfinite(logit):
        raise NonFiniteLogits(
            f"logits are not finite, the largest is {logit}; the weights or the pages behind them "
            "are damaged: load the model again and retry the request"
        )


def _drawn(odds: np.ndarray[Any, np.dtype[np.float64]], seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)
    sums = odds.cumsum()
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(sums) - 1)
