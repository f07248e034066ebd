"""Requests that have names: what is done for one bears its number in every flight record."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from fabric_ray import _native

_MOST_NAMES = 4096

_names: OrderedDict[int, str] = OrderedDict()
_lock = Lock()


def _anew() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock
    _lock = Lock()


os.register_at_fork(after_in_child=_anew)


@contextmanager
def span(name: str) -> Iterator[int]:
    """Everything that is asked of engines within belongs to the request ``name``: transfers,
    expectations, and requests for KV pages. It follows threads' contexts and asyncio's tasks, as
    context variables do.

    Yields:
        the number that records bear, the same for one name in every process.
    """
    number = _native.span_of(name)
    with _lock:
        _names[number] = name
        _names.move_to_end(number)
        if len(_names) > _MOST_NAMES:
            _names.popitem(last=False)
    variable = _native._span_variable()
    token = variable.set(number)
    try:
        yield number
    finally:
        variable.reset(token)


def names() -> dict[int, str]:
    """The latest names that were used in this process, by number."""
    with _lock:
        return dict(_names)
