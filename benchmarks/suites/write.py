"""Single writes of 4 KiB to 256 MiB, cold and hot, over shared memory and over TCP."""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, REGION, Case, Link, Memory, Temperature

_COLD = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB, 256 * MIB)
_HOT: dict[Link, tuple[int, ...]] = {
    "shm": (4 * KIB, 64 * KIB, 256 * KIB, MIB),
    "tcp": (64 * KIB, MIB),
}
_QUICK = (4 * KIB, MIB)


def cases(quick: bool) -> list[Case]:
    found: list[Case] = []
    for link, hot in _HOT.items():
        found += [_case(link, "cold", count, quick) for count in (_QUICK if quick else _COLD)]
        found += [_case(link, "hot", count, quick) for count in (_QUICK if quick else hot)]
    if not quick:
        found += [_case("shm", "cold", count, quick, "ordinary") for count in (MIB, 32 * MIB)]
    return found


def _case(
    link: Link, temperature: Temperature, count: int, quick: bool, memory: Memory = "library"
) -> Case:
    return Case(
        suite="write",
        operation="write",
        link=link,
        bytes=count,
        temperature=temperature,
        memory=memory,
        region=64 * MIB if quick else REGION,
    )
