"""The route of a push from replicas, as an ordinary plan.

Every engine tensor as one rollout holds it is a tensor of its own, which one trainer holds, and
which that rollout and its replicas need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import (
    Concat,
    Container,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Plan,
    Replicate,
    Side,
    Tensor,
    plan,
    replica_groups,
)
from fabric_ray.plan.errors import ExtraTensors
from fabric_ray.plan.leaving import left_behind
from fabric_ray.plan.types import leaves
from fabric_ray.weights.replica.mapping import Group, assign


class ReplicaMeta(msgspec.Struct, frozen=True):
    """What a trainer that gathers tells the controller."""

    stage: int
    fills: tuple[str, ...]
    """Engine tensors that all it takes is gathered for."""
    unused: tuple[str, ...]
    """What it gathers and no engine tensor is made of."""
    used: tuple[str, ...]
    """What it gathers and engine tensors are made of."""
    layout: bytes | None
    """The digest of the rollouts' side, as its replica has it."""
    watched: bool = False
    """Whether a module was watched to find out what engine tensors are made of."""

    @property
    def hint(self) -> str:
        """What else may be the cause where a tensor wasn't used."""
        if not self.watched or not self.unused:
            return ""
        return (
            f". The module wrote nothing when `{self.unused[0]}` was loaded by itself: does its "
            "loader use threads, or keep tensors until others have come?"
        )


def layout_digest(side: Side) -> bytes:
    return blake2b(msgspec.msgpack.encode(side), digest_size=16).digest()


def named(container: str, rank: int) -> str:
    """An engine tensor as it is on one rollout."""
    return f"{container}@{rank}"


def unnamed(tensor: str) -> tuple[str, int]:
    """The engine tensor and the rollout of a name that :func:`named` has made."""
    container, _, rank = tensor.rpartition("@")
    return container, int(rank)


def side_by_side(like: Container, parts: Sequence[Leaf]) -> list[Container]:
    """A container of which every rank has one of several parts."""
    layouts: Sequence[Layout] = parts
    if len(parts) > 1 and parts[0].tensor.shape:
        layouts = [Concat(0, tuple(parts))]
    # Numbers have no axis to lie behind each other along.
    return [Container(like.name, like.dtype, layout, like.strides) for layout in layouts]


def whole_tensors(side: Side) -> dict[str, Tensor]:
    """What a side's containers are made of, by name."""
    found = (leaf.tensor for c in side.containers for leaf in leaves(c.layout))
    return {tensor.name: tensor for tensor in found}


def whole_side(tensors: Iterable[Tensor], rank: int = 0) -> Side:
    """One rank that holds tensors whole, under their own names."""
    mesh = Mesh.line([rank])
    containers = [Container(t.name, t.dtype, Leaf(t, mesh, (Replicate(),))) for t in tensors]
    return Side.of([rank], containers)


def whole_plan(side: Side) -> Plan:
    """How all containers of a side are filled from whole tensors, those of rank 0."""
    return plan(whole_side(whole_tensors(side).values()), side)


def replica_sides(
    said: Sequence[Any], target: Side, needed: Side, *, leave: Sequence[str]
) -> tuple[Side, Side, tuple[str, ...]]:
    """Both sides of the plan by which trainers with replicas fill rollouts, and the names of the
    gathered tensors that stay behind.

    The containers that are needed keep their names, shapes, dtypes and strides; what they are made
    of becomes one tensor for each group of replicas. So each has one holder, and is sent whole.

    Args:
        said: by trainer rank, what it reported.
        target: the rollouts' side.
        needed: what of it trainers are to fill.
        leave: patterns of names of gathered tensors that may stay behind.

    Raises:
        ExtraTensors: others that no rollout needs are gathered.
        InvalidArgument: the reports don't fit together, or a container is filled by no stage or by
            several; names trainers and containers.
    """
    metas = _checked(said, target)
    left = _left(metas, leave)
    whole = whole_plan(needed)
    senders = _senders(metas, needed, whole)
    rollouts: dict[int, _Rollout] = {}
    sources: list[Container] = []
    targets: list[Container] = []
    for container in _by_name(needed).values():
        parts: list[Leaf] = []
        padding: tuple[int, ...] | None = None
        for trainer, group in senders[container.name]:
            if group[0] not in rollouts:
                rollouts[group[0]] = _Rollout(whole, group[0])
            rollout = rollouts[group[0]]
            shape = rollout.shapes.get(container.name)
            if shape is None or container.name not in rollout.filled:
                padding = padding or shape
                continue
            tensor = Tensor(named(container.name, group[0]), shape, container.dtype)
            here = Leaf(tensor, Mesh.line([trainer]), (Replicate(),))
            sources.append(Container(tensor.name, tensor.dtype, here, container.strides))
            parts.append(Leaf(tensor, Mesh.line(group), (Replicate(),)))
        for made in side_by_side(container, parts):
            # Some rollouts have nothing of it but padding.
            if padding is not None:
                made = replace(made, layout=Pad(made.layout, padding), ranks=container.ranks)
            targets.append(made)
    return Side.of(len(metas), sources), Side.of(needed.ranks, targets), left


def _left(metas: Sequence[ReplicaMeta], leave: Sequence[str]) -> tuple[str, ...]:
    used = {name for meta in metas for name in meta.used}
    unused = [name for meta in metas for name in meta.unused]
    try:
        return left_behind([*used, *unused], used, leave)
    except ExtraTensors as error:
        hint = next((meta.hint for meta in metas if error.tensor in meta.unused), "")
        raise ExtraTensors(str(error) + hint, tensor=error.tensor) from None


class _Rollout:
    """What one rollout holds."""

    def __init__(self, whole: Plan, rank: int) -> None:
        self.shapes = {c.name: c.shape for c in whole.local_containers("target", rank)}
        names = whole.containers("target")
        self.filled = {names[index] for index in np.unique(whole.for_target(rank).dst_container)}
        """Containers that aren't all padding."""


def _senders(
    metas: Sequence[ReplicaMeta], needed: Side, whole: Plan
) -> dict[str, list[tuple[int, Group]]]:
    """The trainer of each rollout, by container."""
    stage_of = _stages(metas, needed)
    out: dict[str, list[tuple[int, Group]]] = {}
    for stage in set(stage_of.values()):
        containers = [c for c in needed.containers if stage_of[c.name] == stage]
        trainers = [rank for rank, meta in enumerate(metas) if meta.stage == stage]
        alike = replica_groups(Side.of(needed.ranks, containers))
        # Trainers send nothing to rollouts that receive from another rollout.
        dealt = assign(trainers, [group for group in alike if whole.expected_pages(group[0])])
        senders = [(trainer, group) for trainer, groups in dealt.items() for group in groups]
        out |= {container.name: senders for container in containers}
    return out


def _by_name(target: Side) -> dict[str, Container]:
    found: dict[str, Container] = {}
    for container in target.containers:
        if found.setdefault(container.name, container).strides != container.strides:
            raise InvalidArgument(
                f"container `{container.name}` has other strides on some rollouts than on others; "
                "replicas fill engines whose ranks are alike"
            )
    return found


def _stages(metas: Sequence[ReplicaMeta], target: Side) -> dict[str, int]:
    """The one stage that fills each container."""
    found: dict[str, set[int]] = defaultdict(set)
    for meta in metas:
        for name in meta.fills:
            found[name].add(meta.stage)
    out = {}
    for container in target.containers:
        stages = sorted(found[container.name])
        if not stages:
            raise InvalidArgument(
                f"no trainer gathers what container `{container.name}` of the rollouts is made of; "
                "gather it in some stage" + next((m.hint for m in metas if m.hint), "")
            )
        if len(stages) > 1:
            raise InvalidArgument(
                f"stages {stages} all gather what container `{container.name}` is made of; let one "
                "stage gather it"
            )
        out[container.name] = stages[0]
    return out


def _checked(said: Sequence[Any], target: Side) -> list[ReplicaMeta]:
    """The reports, if they are of one kind and of one model."""
    metas: list[ReplicaMeta] = []
    digest = layout_digest(target)
    first: dict[int, tuple[int, ReplicaMeta]] = {}
    for rank, meta in enumerate(said):
        if not isinstance(meta, ReplicaMeta):
            raise InvalidArgument(
                f"trainer {rank} holds a WeightSource and others hold a ReplicaSource; make all of "
                "them of one kind"
            )
        if meta.layout not in (None, digest):
            raise InvalidArgument(
                f"the replica of trainer {rank} has another layout than the rollouts; give it the "
                "side that their targets were given"
            )
        other, like = first.setdefault(meta.stage, (rank, meta))
        if set(meta.fills) != set(like.fills):
            odd = sorted(set(meta.fills) ^ set(like.fills))[0]
            raise InvalidArgument(
                f"trainers {other} and {rank} are of stage {meta.stage}, but only one of them "
                f"gathers what `{odd}` is made of; all of a stage gather the same"
            )
        metas.append(meta)
    return metas
