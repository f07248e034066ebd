"""Tests that want a tool say what they lack; where the tool is demanded, they fail."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacks(variable: str, what: str) -> NoReturn:
    """Skips the test for ``what``, or fails it if ``variable`` of the environment is set.

    Args:
        variable: one that demands the tool by ``require``, or names it.
        what: what lacks, and how to get it.
    """
    if os.environ.get(variable):
        pytest.fail(f"{variable} demands it, and {what}")
    pytest.skip(what)
