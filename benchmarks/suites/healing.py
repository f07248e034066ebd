"""What retry and health cost where nothing fails: 64 writes in flight, with and without them."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, WINDOW, Case, Link

_LINKS: tuple[Link, ...] = ("tcp", "shm")
_SIZES = (KIB, 64 * KIB, MIB)


def cases(quick: bool) -> list[Case]:
    return [
        Case(
            suite="healing",
            operation="flight",
            link=link,
            bytes=count,
            window=WINDOW,
            region=WINDOW * count,
        )
        for link in _LINKS
        for count in (_SIZES[:2] if quick else _SIZES)
    ]
