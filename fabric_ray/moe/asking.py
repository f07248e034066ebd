"""What the ranks of a group answer, and whom to leave out by what they say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from fabric_ray.runtime.causes import cause_of

WATCH_S = 0.5
"""Between two looks at whom ranks have given up, while a pass takes long; and for a look."""


def given_up(named: Mapping[int, Collection[int]]) -> set[int]:
    """Whom to leave out, so that nobody who stays has given up another who stays.

    A rank that fell behind gives up the others as they give it up: who is named most often goes
    first, of equals the higher rank.

    Args:
        named: ranks that each living one has given up.
    """
    out: set[int] = set()
    while True:
        votes = Counter(
            blamed
            for rank, all_blamed in named.items()
            for blamed in all_blamed
            if rank not in out and blamed in named and blamed not in out
        )
        if not votes:
            return out
        out.add(max(votes, key=lambda rank: (votes[rank], rank)))


def gather(
    refs: Mapping[Any, int],
    timeout: float,
    hopeless: Callable[[Mapping[int, Any], Collection[int]], bool] = lambda *_: False,
    watch: Callable[[], None] | None = None,
) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and failures by rank, once all are there, or the rest is ``hopeless`` or late;
    ``watch`` is called as long as nothing comes."""
    deadline = time.monotonic() + timeout
    said: dict[int, Any] = {}
    failed: dict[int, str] = {}
    waiting = dict(refs)
    while waiting and not hopeless(said, waiting.values()):
        left = max(0.0, deadline - time.monotonic())
        at_once = left if watch is None else min(left, WATCH_S)
        ready, _ = ray.wait([*waiting], num_returns=1, timeout=at_once)
        if not ready and left > at_once and watch is not None:
            watch()
            continue
        if not ready:
            break
        rank = waiting.pop(ready[0])
        try:
            said[rank] = ray.get(ready[0])
        except RayError as error:
            failed[rank] = cause_of(error)
    for rank in waiting.values():
        failed[rank] = f"it gave no answer within {timeout} s, or the others had given it up"
    return said, failed
