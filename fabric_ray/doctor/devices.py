"""Libraries and NICs of this host, which of them an engine uses, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from fabric_ray import _native
from fabric_ray.decoding import converted
from fabric_ray.doctor.findings import Finding, Status


class Library(msgspec.Struct, frozen=True):
    """A library that is loaded at run time; ``what`` is its version, or why it can't be used."""

    found: bool
    what: str


class Gid(msgspec.Struct, frozen=True):
    """An address of a port."""

    index: int
    address: str
    kind: str
    netdev: str | None
    chosen: bool
    why: str


class Port(msgspec.Struct, frozen=True):
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    link_layer: str
    chosen: bool
    why: str
    gids: tuple[Gid, ...]


class Offer(msgspec.Struct, frozen=True):
    """A domain that libfabric lists."""

    provider: str
    fabric: str
    domain: str
    pci: str | None
    rdma: bool
    chosen: bool
    why: str


class Survey(msgspec.Struct, frozen=True):
    """Both libraries, and the devices that they list."""

    verbs: Library
    ports: tuple[Port, ...]
    libfabric: Library
    offers: tuple[Offer, ...]


def survey(names: Sequence[str] = (), provider: str | None = None) -> Survey:
    """Lists libraries and devices; opens none."""
    return converted(_native.survey(list(names), provider), Survey)


def devices(found: Survey) -> Iterator[Finding]:
    """Yields findings about libraries, ports, GIDs and libfabric domains."""
    needed = bool(found.ports)
    if found.verbs.found:
        yield Finding("libibverbs", "libibverbs", "ok", found.verbs.what)
    else:
        yield Finding(
            "libibverbs",
            "libibverbs",
            "fail" if needed else "absent",
            found.verbs.what,
            "install libibverbs1 and ibverbs-providers (rdma-core)" if needed else "",
        )
    if not found.ports:
        yield Finding("devices", "RDMA devices", "absent", "none (/sys/class/infiniband)")
    for port in found.ports:
        yield from _port(port)
    if found.libfabric.found:
        yield Finding("libfabric", "libfabric", "ok", found.libfabric.what)
    else:
        yield Finding("libfabric", "libfabric", "absent", found.libfabric.what)
    for offer in found.offers:
        subject = f"{offer.provider} {offer.domain}"
        yield Finding("offer", subject, "ok" if offer.chosen else "absent", offer.why)


def nowhere(found: Survey, names: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding for each name or glob that matches no NIC."""
    there = {p.device for p in found.ports} | {o.domain for o in found.offers}
    for name in names:
        if not any(fnmatchcase(nic, name) for nic in there):
            here = ", ".join(sorted(there)) or "none"
            detail = f"nothing matches it; this host has: {here}"
            yield Finding("nic", f"NIC {name}", "fail", detail, "see fabric-ray topo")


def _port(port: Port) -> Iterator[Finding]:
    subject = f"{port.device} port {port.port}"
    usable = any(g.chosen for g in port.gids)
    if port.chosen:
        yield Finding("port", subject, "ok", f"{port.link_layer}, {port.state}: {port.why}")
    elif port.state != "ACTIVE":
        remedy = f"check the cable and the switch; ip link set {_netdev(port)} up"
        yield Finding("port-down", subject, "fail", f"{port.state}: {port.why}", remedy)
    elif not usable:
        remedy = f"give {_netdev(port)} an IP address, or name one by gid_index"
        yield Finding("no-gid", subject, "fail", port.why, remedy)
    else:
        yield Finding("port", subject, "absent", port.why)
    for gid in port.gids:
        status: Status = "ok" if gid.chosen else "absent"
        text = f"{gid.kind} {gid.address}: {gid.why}"
        yield Finding("gid", f"{subject} GID {gid.index}", status, text)


def _netdev(port: Port) -> str:
    return next((g.netdev for g in port.gids if g.netdev), "its interface")
