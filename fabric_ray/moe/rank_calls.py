"""Collects the answers of a group's ranks, and decides which ranks to evict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from fabric_ray.runtime.causes import cause_of

WATCH_S = 0.5
"""Seconds between two polls of a long pass for evicted ranks, and the timeout of a poll."""


def ranks_to_evict(named: Mapping[int, Collection[int]]) -> set[int]:
    """Ranks to evict so that no remaining rank has given up another remaining rank.

    A rank that fell behind gives up the others while they give it up. The rank named most often is
    evicted first, the higher rank among equals.

    Args:
        named: for each living rank, the ranks that it has given up.
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
    """Results and failures by rank, once all ranks have answered, ``hopeless`` gives up the rest,
    or the timeout is over. ``watch`` is called while no answer comes."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    waiting = dict(refs)
    while waiting and not hopeless(results, waiting.values()):
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
            results[rank] = ray.get(ready[0])
        except RayError as error:
            failed[rank] = cause_of(error)
    for rank in waiting.values():
        failed[rank] = f"no answer within {timeout} s, or all other ranks have given it up"
    return results, failed
