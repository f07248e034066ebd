"""The whole examination."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from fabric_ray.doctor.devices import Survey, devices, nowhere, survey
from fabric_ray.doctor.findings import Finding, Report
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
    """Looks at libraries, NICs and limits, then sends bytes over every usable pair of links.

    Args:
        nics: only these, by name or glob.
        provider: judge libfabric by this provider instead of efa.
        budget: seconds for the writes.
        on_finding: called with each finding as it is made.
    """
    began = time.monotonic()
    findings = []
    for finding in _all(nics, provider, budget):
        findings.append(finding)
        if on_finding is not None:
            on_finding(finding)
    return Report(tuple(findings), time.monotonic() - began)


def _all(nics: Sequence[str], provider: str | None, budget: float) -> Iterator[Finding]:
    found = survey(nics, provider)
    yield from devices(found)
    yield from nowhere(found, nics)
    yield from system(has_nics=bool(found.ports) or any(o.rdma for o in found.offers))
    yield from writes(links(found, provider, nics), budget)


def links(found: Survey, provider: str | None = None, nics: Sequence[str] = ()) -> list[Link]:
    """The ends that an engine on this host could use; with ``nics`` only these, by name or glob."""
    # Also those that an engine would leave to others: they should work.
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
