"""How many examples a property test draws, and which combinations of parameters the gate sees."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

_DIVISOR = int(os.environ.get("FABRIC_RAY_EXAMPLES_DIVISOR", "1"))
_FEWEST = 5


def examples(count: int) -> int:
    """``count``, divided by ``FABRIC_RAY_EXAMPLES_DIVISOR``, but 5 at least if ``count`` is.

    ``make test`` sets the divisor; ``make test-long`` draws all examples.
    """
    return max(count // _DIVISOR, min(count, _FEWEST))


def by_turns(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of values. ``make test`` takes each value of the last axis by turns, so that
    it sees every value of every axis; ``make test-long`` takes the others too."""
    combinations = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=[] if sum(i for i, _ in combination) % len(axes[-1]) == 0 else [pytest.mark.long],
        )
        for combination in combinations
    ]
