"""Messages for the user who runs the guest."""

from __future__ import annotations

import sys


class GuestError(Exception):
    """No guest can be had, in words that say what to do; told without a traceback."""


def say(text: str) -> None:
    print(f"rdma-guest: {text}", file=sys.stderr, flush=True)
