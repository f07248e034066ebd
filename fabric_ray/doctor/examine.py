"""Examines this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from fabric_ray.doctor.devices import Survey, devices, nowhere, survey
from fabric_ray.doctor.findings import Finding, Report, collected
from fabric_ray.doctor.system import system
from fabric_ray.doctor.writes import Link, writes

BUDGET = 25.0
"""Seconds for the writes, by default."""


def examine(
    *,
    nics: Sequence[str] = (),
    provider: str | None = None,
    budget: float = BUDGET,
    on_finding: Callable[[Finding], object] | None = None,
) -> Report:
    """Examines libraries, NICs and limits, then writes over every usable pair of links.

    Args:
        nics: names or globs of NICs; all by default.
        provider: libfabric provider; efa by default.
        budget: seconds for the writes.
        on_finding: called with each finding at once.
    """
    return collected(_all(nics, provider, budget), on_finding)


def _all(nics: Sequence[str], provider: str | None, budget: float) -> Iterator[Finding]:
    found = survey(nics, provider)
    yield from devices(found)
    yield from nowhere(found, nics)
    yield from system(has_nics=bool(found.ports) or any(o.rdma for o in found.offers))
    yield from writes(links(found, provider, nics), budget)


def links(found: Survey, provider: str | None = None, nics: Sequence[str] = ()) -> list[Link]:
    """The links that an engine of this host could use; ``nics`` are names or globs."""
    # Includes NICs that an engine wouldn't choose: they should work too.
    usable = [
        p
        for p in found.ports
        if p.state == "ACTIVE"
        and any(g.chosen for g in p.gids)
        and (not nics or any(fnmatchcase(p.device, name) for name in nics))
    ]
    verbs = [Link("verbs", p.device) for p in usable if found.verbs.found]
    fabric = [Link("libfabric", o.domain, provider) for o in found.offers if o.chosen]
    return [Link("shm"), Link("tcp"), *verbs, *fabric]
