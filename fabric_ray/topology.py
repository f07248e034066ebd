"""Which NICs are near which GPU, which of them each uses, and why.

The kernel's word is taken from sysfs, the user's from rules such as
``gpu0=mlx5_0,mlx5_1; host=mlx5_2; exclude=mlx5_bond_*``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fabric_ray import _native
from fabric_ray.decoding import converted

RULES_VARIABLE = "FABRIC_RAY_RAILS"

__all__ = [
    "RULES_VARIABLE",
    "Gpu",
    "LeftOut",
    "Machine",
    "Nic",
    "Node",
    "Pair",
    "Place",
    "Rail",
    "read",
]


class Node(msgspec.Struct, frozen=True):
    """A NUMA node."""

    id: int
    cpus: tuple[int, ...]
    """Empty where the node is memory alone, as a GPU's may be."""


class Place(msgspec.Struct, frozen=True):
    """Where a device sits in the PCI tree."""

    address: str
    """``0000:18:00.0``."""
    root: str
    """Its root complex, as sysfs names it: ``pci0000:15``."""
    bridges: tuple[str, ...]
    """Addresses from the root port down."""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU; ``gpu0`` has the lowest PCI address."""

    name: str
    place: Place
    numa: int | None
    vendor: int
    device: int
    distances: tuple[tuple[str, str], ...]
    """To each NIC: ``PIX`` or ``PXB`` (a switch, or several), ``PHB`` (the root complex),
    ``NODE`` (the NUMA node), ``SYS`` (another node) or ``?``."""


class Nic(msgspec.Struct, frozen=True):
    """An RDMA device."""

    name: str
    place: Place | None
    """``None`` for software devices."""
    numa: int | None
    software: bool
    port: int
    """Of the fastest port that is up, or of the fastest of all; 0 without any."""
    link: str
    """``InfiniBand``, ``Ethernet`` or ``EFA``."""
    state: str
    """``ACTIVE`` or why not."""
    gbps: float
    """Gigabits per second."""
    interfaces: tuple[str, ...]


class Rail(msgspec.Struct, frozen=True, array_like=True):
    """A NIC that a GPU or node uses, and how far it is."""

    nic: str
    distance: str


class Pair(msgspec.Struct, frozen=True):
    """The rails of one GPU, or of the host's memory on one NUMA node."""

    name: str
    """``gpu0``, ``host0``."""
    rails: tuple[Rail, ...]
    """At most four; none where there is no usable device."""
    reason: str


class LeftOut(msgspec.Struct, frozen=True):
    """A NIC that no GPU or node uses."""

    nic: str
    reason: str


class Machine(msgspec.Struct, frozen=True):
    """A machine's devices in the order of PCI addresses, and their pairing."""

    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    pairs: tuple[Pair, ...]
    """GPUs first, then NUMA nodes that have CPUs."""
    left_out: tuple[LeftOut, ...]

    def rails(self, name: str) -> Sequence[Rail]:
        """The rails of ``gpu0``, ``host0`` and so on.

        Raises:
            KeyError: there is no such GPU or node.
        """
        for pair in self.pairs:
            if pair.name == name:
                return pair.rails
        raise KeyError(f"got {name}, expected one of {', '.join(p.name for p in self.pairs)}")


def read(root: str | Path = "/sys", rules: str | None = None) -> Machine:
    """Reads a machine and pairs its GPUs and NUMA nodes with NICs.

    Args:
        root: ``/sys``, or a recorded copy of one.
        rules: by default those of the variable ``FABRIC_RAY_RAILS``.

    Raises:
        InvalidArgument: ``root`` is no sysfs tree, or a rule matches nothing; lists what there is.
    """
    if rules is None:
        rules = os.environ.get(RULES_VARIABLE)
    return converted(_native.topology(os.fspath(root), rules), Machine)
