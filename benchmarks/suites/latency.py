"""An 8-byte counted write into a receiver that waits, by every way of waiting."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, Case, Link, Waiter

_LINKS: tuple[Link, ...] = ("shm", "tcp")
_WAITERS: tuple[Waiter, ...] = (
    "spin-native",
    "callback-native",
    "poll-python",
    "callback-python",
    "asyncio",
    "parked",
)
_QUICK: tuple[Waiter, ...] = ("spin-native", "poll-python", "parked")


def cases(quick: bool) -> list[Case]:
    return [
        Case(
            suite="latency",
            operation="latency",
            link=link,
            bytes=8,
            temperature="hot",
            waiter=waiter,
            region=64 * KIB,
        )
        for link in _LINKS
        for waiter in (_QUICK if quick else _WAITERS)
    ]
