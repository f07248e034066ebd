"""What a trainer does to each of its tensors before it is sent."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from fabric_ray.plan import Container, Replicate, Side
from fabric_ray.plan.types import Leaf, leaves
from fabric_ray.weights.quant import Cast, Formats
from fabric_ray.weights.quant.formats import format_of, suffix
from fabric_ray.weights.simulation.setting import Costs, Setting
from fabric_ray.weights.steps import Unit

Ready = tuple[float, float, float, float]
"""Seconds of the stages before sending."""
Ranks = tuple[int, ...]


class _Held(msgspec.Struct, frozen=True, gc=False):
    """What each rank of one mesh holds of a container, and sends of it; bytes."""

    name: str
    share: int
    whole: int
    changes: bool
    values: int
    """Where it comes among the containers that are sent."""
    values_nbytes: int
    scales: int | None
    scales_nbytes: int


class Task(msgspec.Struct, frozen=True, gc=False):
    """One tensor of one rank."""

    unit: Unit
    ready: Ready
    group: int
    """Of the meshes that are gathered one after the other."""


class Tasks:
    """Of all ranks.

    Args:
        held: what trainers hold.
        sent: what they send: the same, or its quantised form.
    """

    def __init__(self, held: Side, sent: Side, formats: Formats, setting: Setting) -> None:
        self._setting = setting
        self._by_mesh: defaultdict[Ranks, list[_Held]] = defaultdict(list)
        at = {container.name: number for number, container in enumerate(sent.containers)}
        for container in held.containers:
            for ranks, one in _of(container, sent, at, formats):
                self._by_mesh[ranks].append(one)
        self._members = {ranks: frozenset(ranks) for ranks in self._by_mesh}

    def of(self, rank: int) -> list[Task]:
        """What has to be done by one rank; nothing to what is sent from where it lies."""
        held = [
            one
            for ranks, these in self._by_mesh.items()
            if rank in self._members[ranks]
            for one in these
        ]
        stacks = Counter(_stack(one.name) for one in held)
        costs, gather = self._setting.costs, self._setting.gather
        return [
            Task(
                _unit(one, gather=gather),
                _ready(costs, stacks[_stack(one.name)], gather=gather, changes=one.changes),
                int(gather and _is_expert(one.name)),
            )
            for one in held
            if one.changes or gather or costs.h2d
        ]


def tensors(names: Iterable[str]) -> int:
    """How many there are, a layer's experts counted as one."""
    return len({_stack(name) for name in names})


def _of(
    container: Container, sent: Side, at: dict[str, int], formats: Formats
) -> Iterator[tuple[Ranks, _Held]]:
    fmt = format_of(container, formats) if formats else None
    values = at[container.name]
    scales = None
    if fmt is not None and not isinstance(fmt, Cast):
        scales = at.get(container.name + suffix(fmt))
    share, whole = _nbytes(container)
    values_nbytes, _ = _nbytes(sent.containers[values])
    scales_nbytes = {} if scales is None else _nbytes(sent.containers[scales])[0]
    # Scales may lie on other meshes than their values; all ranks have about as many.
    some = max(scales_nbytes.values(), default=0)
    for ranks, nbytes in share.items():
        yield (
            ranks,
            _Held(
                container.name,
                nbytes,
                whole[ranks],
                fmt is not None,
                values,
                values_nbytes[ranks],
                scales,
                some,
            ),
        )


def _nbytes(container: Container) -> tuple[dict[Ranks, int], dict[Ranks, int]]:
    """Bytes of a rank's share of a container, and of all of it, by mesh."""
    share: Counter[Ranks] = Counter()
    whole: Counter[Ranks] = Counter()
    for leaf in leaves(container.layout):
        box = math.prod(size for _, size in leaf.slice) if leaf.slice else _elements(leaf)
        nbytes = box * leaf.tensor.dtype.itemsize
        whole[leaf.mesh.ranks] += nbytes
        share[leaf.mesh.ranks] += -(-nbytes // _parts(leaf))
    return share, whole


def _elements(leaf: Leaf) -> int:
    return math.prod(leaf.tensor.shape)


def _parts(leaf: Leaf) -> int:
    dims = zip(leaf.mesh.shape, leaf.placements, strict=True)
    return math.prod(size for size, placement in dims if not isinstance(placement, Replicate))


def _unit(one: _Held, *, gather: bool) -> Unit:
    values = one.values_nbytes if one.changes else one.share
    if gather:
        values = one.whole
    return Unit(one.name, one.values, values, one.scales, one.scales_nbytes)


def _ready(costs: Costs, together: int, *, gather: bool, changes: bool) -> Ready:
    """A call is for all experts of a layer together, as trainers stack them."""
    return (
        costs.h2d / together,
        costs.gather * costs.gathers / together if gather else 0.0,
        costs.fuse / together if gather else 0.0,
        costs.quantise / together if changes else 0.0,
    )


@lru_cache(maxsize=1 << 18)
def _stack(name: str) -> str:
    return re.sub(r"(experts\.|\.weight|\.bias)\d+", r"\1*", name)


@lru_cache(maxsize=1 << 18)
def _is_expert(name: str) -> bool:
    return re.search(r"\.experts\.", name) is not None
