"""Writes with 64 in flight, over the providers that libfabric has without a NIC.

The memory is that of 64 writes, which `fi_rma_bw` walks through, too (cold; before 1.19 it stays on
the first, hot).
"""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, WINDOW, Case, Link, Temperature

_LINKS: tuple[Link, ...] = ("tcp", "shm")
_TEMPERATURES: tuple[Temperature, ...] = ("cold", "hot")
_SIZES = (64 * KIB, MIB, 4 * MIB)


def cases(quick: bool) -> list[Case]:
    return [
        Case(
            suite="nics",
            operation="window",
            link=link,
            temperature=temperature,
            bytes=count,
            region=WINDOW * count,
        )
        for link in _LINKS
        for temperature in (_TEMPERATURES[:1] if quick else _TEMPERATURES)
        for count in (_SIZES[:2] if quick else _SIZES)
    ]
