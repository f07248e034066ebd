"""How many examples a property test draws."""

from __future__ import annotations

import os

_DIVISOR = int(os.environ.get("FABRIC_RAY_EXAMPLES_DIVISOR", "1"))
_FEWEST = 10


def examples(count: int) -> int:
    """``count``, divided by ``FABRIC_RAY_EXAMPLES_DIVISOR``, but 10 at least if ``count`` is.

    ``make test`` sets the divisor; ``make test-long`` draws all examples.
    """
    return max(count // _DIVISOR, min(count, _FEWEST))
