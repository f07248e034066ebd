"""``fabric-ray topo``: which NICs are near which GPU, and which of them each uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from fabric_ray import topology
from fabric_ray.cli.console import plain, ranges, stdout
from fabric_ray.cli.ending import errors_in_words
from fabric_ray.topology import Gpu, Machine, Nic

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD"}


def topo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sys: Annotated[Path, typer.Option(help="A recorded copy of /sys.")] = Path("/sys"),
    rules: Annotated[
        str | None,
        typer.Option(
            envvar=topology.RULES_VARIABLE,
            help="For example: gpu0=mlx5_0,mlx5_1; host=mlx5_2; exclude=mlx5_bond_*",
        ),
    ] = None,
) -> None:
    """Which NICs are near which GPU, which of them each uses, and why.

    \b
    Examples:
      fabric-ray topo                              # the tree, and the pairs
      fabric-ray topo --rules 'exclude=mlx5_bond_*'  # what a rule would change
      fabric-ray topo --sys ./recorded/sys         # of a machine whose /sys was copied
      fabric-ray topo --json | jq '.pairs[].name'

    Exits with 2 for rules that name nothing or that aren't rules.
    """
    with errors_in_words():
        machine = topology.read(sys, rules)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(machine)))
        return
    console = stdout()
    console.print(_tree(machine))
    console.print(_pairs(machine))
    if machine.left_out:
        console.print(_left_out(machine))
    if machine.gpus and machine.nics:
        console.print("PIX, PXB: same PCIe switch (one, several) · PHB: same root complex")
        console.print("NODE: same NUMA node · SYS: another node · ?: unknown")


def _tree(machine: Machine) -> Tree:
    host = Tree("host")
    devices: list[Gpu | Nic] = [*machine.gpus, *machine.nics]
    for node in machine.nodes:
        here = [d for d in devices if d.numa == node.id]
        # The many nodes that are a GPU's memory hold nothing to draw.
        if node.cpus or here:
            _draw(host.add(f"NUMA node {node.id} · {_cpus(node.cpus)}"), here)
    elsewhere = [d for d in devices if d.numa is None]
    if elsewhere:
        _draw(host.add("NUMA node unknown"), elsewhere)
    return host


def _draw(node: Tree, devices: list[Gpu | Nic]) -> None:
    roots: dict[str, list[Gpu | Nic]] = {}
    for device in devices:
        roots.setdefault(device.place.root if device.place else "", []).append(device)
    for root, below in roots.items():
        if root:
            _draw_bus(node.add(f"root complex {root.removeprefix('pci')}"), below, 0)
        else:
            for device in below:
                node.add(_label(device))


def _draw_bus(parent: Tree, devices: list[Gpu | Nic], depth: int) -> None:
    """Draws devices that share their first ``depth`` bridges.

    Bridges matter where paths part: those that lead to one device, or all to the same next bridge,
    are left away.
    """
    groups: dict[str, list[Gpu | Nic]] = {}
    for device in devices:
        bridges = device.place.bridges if device.place else ()
        below = bridges[depth] if len(bridges) > depth else device.name
        groups.setdefault(below, []).append(device)
    for group in groups.values():
        if len(group) == 1:
            parent.add(_label(group[0]))
            continue
        shared = _shared(group)
        bridge = group[0].place.bridges[shared - 1] if group[0].place else ""
        # Below a root port alone there is no switch: one adapter has several functions.
        kind = "switch" if shared > 1 else "root port"
        _draw_bus(parent.add(f"{kind} {bridge}"), group, shared)


def _shared(devices: list[Gpu | Nic]) -> int:
    """How many bridges all of them have in common."""
    paths = [d.place.bridges for d in devices if d.place]
    shared = 0
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return shared


def _label(device: Gpu | Nic) -> str:
    address = f" {device.place.address}" if device.place else ""
    if isinstance(device, Gpu):
        vendor = _VENDORS.get(device.vendor, f"{device.vendor:04x}")
        return f"[bold green]{device.name}[/]{address} · {vendor} {device.device:04x}"
    parts = [f"{device.link} {device.gbps:g} Gb/s", *device.interfaces]
    if device.software:
        parts.append("software")
    if device.state != "ACTIVE":
        parts.append(f"[red]{escape(device.state)}[/]")
    return f"[bold cyan]{escape(device.name)}[/]{address} · {' · '.join(parts)}"


def _pairs(machine: Machine) -> Table:
    table = plain("for", "rails", "distance", "why", title="\npairing")
    for pair in machine.pairs:
        names = " ".join(rail.nic for rail in pair.rails) or "none"
        distances = " ".join(dict.fromkeys(rail.distance for rail in pair.rails))
        table.add_row(pair.name, escape(names), distances, escape(pair.reason))
    return table


def _left_out(machine: Machine) -> Table:
    table = plain("NIC", "why", title="\nleft out")
    for left_out in machine.left_out:
        table.add_row(escape(left_out.nic), escape(left_out.reason))
    return table


def _cpus(cpus: tuple[int, ...]) -> str:
    if not cpus:
        return "no CPUs"
    return f"CPUs {','.join(ranges(cpus))}"
