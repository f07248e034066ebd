"""A push of a model's weights from two trainers into two rollouts, end to end."""

from __future__ import annotations

from benchmarks.harness.cases import MIB, Case


def cases(quick: bool) -> list[Case]:
    if quick:
        return []
    return [Case(suite="weights", operation="push", link="shm", bytes=512 * MIB)]
