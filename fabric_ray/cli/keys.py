"""Keys that are pressed while something is shown."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fabric_ray.bench.processes import ended_by_signals


@contextmanager
def keys() -> Iterator[Callable[[float], str] | None]:
    """Has keys come one by one and unseen. Yields what waits for one, so many seconds at most, and
    returns it; empty if none came. The terminal is as it was afterwards, however this ends.

    None where stdin is no terminal, or another program's.
    """
    with ended_by_signals():
        if not _in_the_foreground():
            yield None
            return
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal, termios.TCSANOW)
            yield lambda seconds: _pressed(terminal, seconds)
        finally:
            # After a hang-up there is none any more.
            with suppress(termios.error):
                termios.tcsetattr(terminal, termios.TCSANOW, before)


def _in_the_foreground() -> bool:
    """Whether stdin is a terminal whose settings are ours to change: others are stopped for it."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _pressed(terminal: int, seconds: float) -> str:
    ready, _, _ = select.select([terminal], [], [], seconds)
    return os.read(terminal, 1).decode(errors="replace") if ready else ""
