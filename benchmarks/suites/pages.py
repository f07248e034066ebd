"""Shuffled pages in one call: into library memory, over TCP, and into ordinary memory."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, REGION, Case, Link, Memory

_PLACES: tuple[tuple[Link, Memory], ...] = (
    ("shm", "library"),
    ("shm", "ordinary"),
    ("tcp", "library"),
)


def cases(quick: bool) -> list[Case]:
    sizes = (KIB, 16 * KIB) if quick else (KIB, 8 * KIB, 16 * KIB, 64 * KIB)
    counts = (1024,) if quick else (1024, 4096)
    return [
        Case(
            suite="pages",
            operation="pages",
            link=link,
            memory=memory,
            bytes=page,
            pages=count,
            region=64 * MIB if quick else REGION,
        )
        for link, memory in _PLACES
        for page in sizes
        for count in counts
    ]
