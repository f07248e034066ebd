"""Shuffled pages in one call: into library memory, over TCP, and into ordinary memory."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, REGION, Case, Link, Memory

_PLACES: tuple[tuple[Link, Memory, tuple[int, ...]], ...] = (
    ("shm", "library", (1024, 4096)),
    ("shm", "ordinary", (1024,)),
    ("tcp", "library", (1024,)),
)


def cases(quick: bool) -> list[Case]:
    sizes = (KIB, 16 * KIB) if quick else (KIB, 8 * KIB, 16 * KIB, 64 * KIB)
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
        for link, memory, counts in _PLACES
        for page in sizes
        for count in (counts[:1] if quick else counts)
    ]
