"""Small counted writes per second from one thread, with as many in flight as one likes."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, Case, Language, Link

_LINKS: tuple[Link, ...] = ("shm", "tcp")
_LANGUAGES: tuple[Language, ...] = ("native", "python")


def cases(quick: bool) -> list[Case]:
    del quick
    return [
        Case(
            suite="rate",
            operation="rate",
            link=link,
            bytes=8,
            temperature="hot",
            language=language,
            region=64 * KIB,
        )
        for link in _LINKS
        for language in _LANGUAGES
    ]
