"""The task: sort digits. What is right can be computed, so the reward is exact."""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 10
SEPARATOR = DIGITS
"""Ends the prompt; the answer follows."""
VOCAB = DIGITS + 1


def prompts(number: int, length: int, *, generator: torch.Generator) -> Tensor:
    """Random digits and the separator: ``[number, length + 1]``, int64."""
    digits = torch.randint(
        DIGITS, (number, length), generator=generator, dtype=torch.int64, device="cpu"
    )
    separators = torch.full((number, 1), SEPARATOR, dtype=torch.int64, device="cpu")
    return torch.cat([digits, separators], dim=1)


def rewards(tokens: Tensor) -> Tensor:
    """The share of places that hold the right digit.

    Args:
        tokens: prompts with their answers, ``[batch, 2 * length + 1]``.

    Returns:
        ``[batch]``, float32, from 0 to 1.
    """
    length = tokens.shape[1] // 2
    right = tokens[:, :length].sort(dim=1).values
    return (tokens[:, length + 1 :] == right).float().mean(dim=1)


def readable(tokens: Tensor) -> tuple[str, str]:
    """A prompt and its answer, of one row of tokens."""
    length = len(tokens) // 2
    shown = ["·" if token == SEPARATOR else str(token) for token in tokens.tolist()]
    return " ".join(shown[:length]), " ".join(shown[length + 1 :])
