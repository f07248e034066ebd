"""All contenders, in the order in which tables show them."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.contenders import fabric, libfabric, nixl, ucx
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.gloo import Gloo
from benchmarks.contenders.mooncake import Mooncake
from benchmarks.harness.contender import Contender
from fabric_ray.bench.results import Absent


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
    if unknown := wanted - {contender.name for contender in known}:
        raise ValueError(
            f"no contender is called {', '.join(sorted(unknown))}; "
            f"known: {', '.join(contender.name for contender in known)}"
        )
    here: list[Contender] = []
    absent: list[Absent] = []
    for one in known:
        if (wanted and one.name not in wanted) or (one.family == "peer" and not peers):
            continue
        reason = one.available()
        if reason is None:
            here.append(one)
        else:
            absent.append(Absent(contender=one.name, reason=reason, obtain=one.obtain))
    return here, absent


def every() -> list[Contender]:
    """All that there are. The first of ours that has a case is what others are held against."""
    return [
        fabric.KvPages(),
        fabric.FabricRust("fabric-rust"),
        fabric.FabricRust("fabric-rust x2", threads=2),
        fabric.FabricRust("fabric-rust batch", batch=True),
        fabric.FabricRust("fabric-rust no-heal", heals=False),
        fabric.FabricRecorder(records=True),
        fabric.FabricRecorder(records=False),
        fabric.FabricPython("fabric-python"),
        fabric.FabricPython("fabric-python batch", batch=True),
        fabric.FabricLibfabric(),
        Floor(1),
        Floor(2),
        *nixl.variants(),
        Mooncake(),
        Gloo(),
        ucx.UcxPut(),
        ucx.UcxTag(),
        libfabric.PingPong(),
        libfabric.FabTests(),
        libfabric.DeliveredFabTests(),
    ]
