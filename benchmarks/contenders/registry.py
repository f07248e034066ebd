"""All contenders, in the order in which tables show them."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.contenders import nixl
from benchmarks.contenders.fabric import (
    FabricLibfabric,
    FabricPython,
    FabricRecorder,
    FabricRust,
    KvPages,
)
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.gloo import Gloo
from benchmarks.contenders.libfabric import DeliveredFabTests, FabTests, PingPong
from benchmarks.contenders.mooncake import Mooncake
from benchmarks.contenders.ucx import UcxPut, UcxTag
from benchmarks.harness.contender import Contender
from benchmarks.harness.results import Absent


def contenders(*, peers: bool, names: Iterable[str] = ()) -> tuple[list[Contender], list[Absent]]:
    """Those that can run here, and those that can't with the reason.

    Args:
        peers: False leaves out everything that is neither ours nor a floor.
        names: if given, only contenders of these names.

    Raises:
        ValueError: when a name is not one of ours.
    """
    known = every()
    wanted = set(names)
    unknown = wanted - {contender.name for contender in known}
    if unknown:
        known_names = ", ".join(contender.name for contender in known)
        raise ValueError(
            f"no contender is called {', '.join(sorted(unknown))}; known: {known_names}"
        )
    here: list[Contender] = []
    absent: list[Absent] = []
    for contender in known:
        if (wanted and contender.name not in wanted) or (contender.family == "peer" and not peers):
            continue
        reason = contender.available()
        if reason is None:
            here.append(contender)
        else:
            absent.append(Absent(contender=contender.name, reason=reason, obtain=contender.obtain))
    return here, absent


def every() -> list[Contender]:
    """All that there are. The first of ours that has a case is what others are held against."""
    return [
        KvPages(),
        FabricRust("fabric-rust"),
        FabricRust("fabric-rust x2", threads=2),
        FabricRust("fabric-rust batch", batch=True),
        FabricRust("fabric-rust no-heal", heals=False),
        FabricRecorder(records=True),
        FabricRecorder(records=False),
        FabricPython("fabric-python"),
        FabricPython("fabric-python batch", batch=True),
        FabricLibfabric(),
        Floor(1),
        Floor(2),
        *nixl.variants(),
        Mooncake(),
        Gloo(),
        UcxPut(),
        UcxTag(),
        PingPong(),
        FabTests(),
        DeliveredFabTests(),
    ]
