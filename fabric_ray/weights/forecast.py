"""What a weight push would be, from sizes alone: no tensor, actor or cluster is needed."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from fabric_ray.models.config import ModelConfig
from fabric_ray.plan import Balance, Plan, Replicate, Side, plan, replica_groups
from fabric_ray.plan.types import Leaf, leaves
from fabric_ray.weights.families import family_of, target_side
from fabric_ray.weights.families.errors import InvalidRanks
from fabric_ray.weights.quant import Edges, Formats, quantised_source, quantised_target
from fabric_ray.weights.trainers import (
    FsdpParallel,
    Parallel,
    even_stages,
    fsdp_side,
    megatron_side,
)

T = TypeVar("T")

MAX_RANKS = 1 << 15
"""Of the trainers, and of the rollouts."""
MAX_PAIRS = 1 << 22
"""Of a trainer and a rollout."""


class Trainers(msgspec.Struct, frozen=True):
    """The trainers of a forecast."""

    parallel: FsdpParallel | Parallel
    """FSDP2 or Megatron-Core."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage (and of each of its virtual parts); even by default."""

    def side(self, config: ModelConfig) -> Side:
        """What each rank holds.

        Raises:
            FamilyError: the sizes don't fit each other or the model.
        """
        if isinstance(self.parallel, FsdpParallel):
            return fsdp_side(config, self.parallel, stages=self.stages)
        count = self.parallel.pp * self.parallel.vpp
        stages = self.stages or even_stages(config.layers, count)
        return megatron_side(config, self.parallel, stages=stages)


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a forecast: engines of ``dp`` groups of ``tp`` ranks."""

    tp: int = 1
    ep: int = 1
    """Groups of an engine's ranks that own whole experts."""
    dp: int = 1
    """Groups that hold everything but experts: data-parallel attention."""
    engines: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.engines

    def side(self, config: ModelConfig) -> Side:
        """What each rank holds.

        Raises:
            FamilyError: the sizes don't fit each other or the model.
        """
        if min(self.tp, self.dp, self.engines) < 1:
            raise InvalidRanks(
                f"tp={self.tp}, dp={self.dp} and engines={self.engines} must be 1 or more",
                family=config.kind,
            )
        return target_side(config, tp=self.tp, ep=self.ep, dp=self.dp, ranks=range(self.world))


class Push(msgspec.Struct, frozen=True):
    """A push that might be made.

    Raises:
        InvalidRanks: more ranks, or more pairs of them, than are planned in minutes.
    """

    config: ModelConfig
    trainers: Trainers
    rollouts: Rollouts
    formats: Formats = {}
    """What changes its dtype on the way."""

    def __post_init__(self) -> None:
        trainers, rollouts = self.trainers.parallel.world, self.rollouts.world
        for role, ranks in (("trainers", trainers), ("rollouts", rollouts)):
            if ranks > MAX_RANKS:
                raise InvalidRanks(
                    f"{role}: got {ranks:,} ranks, expected at most {MAX_RANKS:,}; give smaller "
                    "sizes",
                    family=self.config.kind,
                )
        if trainers * rollouts > MAX_PAIRS:
            raise InvalidRanks(
                f"{trainers:,} trainers and {rollouts:,} rollouts: got {trainers * rollouts:,} "
                f"pairs, expected at most {MAX_PAIRS:,}; give smaller sizes",
                family=self.config.kind,
            )


class Spent(msgspec.Struct, frozen=True):
    """What a step of the preparations took."""

    seconds: float
    cpu_seconds: float


class Forecast(msgspec.Struct, frozen=True):
    """What a push would move, and what preparing it takes. Bytes, unless said otherwise."""

    parameters: int
    """Elements."""
    balance: Balance
    """Bytes in all, by trainer and by rollout; the busiest over the mean."""
    once_nbytes: int
    """What trainers would send if rollouts that hold the same passed it on (``relay=True``)."""
    links: int
    """Pairs of ranks that exchange anything."""
    copies: int
    copies_stored: int
    """Without those that replicas share."""
    encoded_nbytes: int
    """The plan with both layouts, as every rank gets it."""
    holders: dict[int, int]
    """By the number of trainers that hold them and share the sending: bytes of the model, in the
    trainers' dtype."""
    exchanged_maxima: int
    """Of blocks that lie on several trainers: float32 values that the busiest of them shares with
    others before a push. Nothing else is gathered."""
    derived: tuple[str, ...]
    """Tensors that engines compute anew after each push, by patterns of their names."""
    spent: dict[str, Spent]
    """On both sides' layouts, on edges of blocks, on the plan and on its encoding."""
    peak_nbytes: int
    """The most memory that this process has held."""

    @property
    def busiest_nbytes(self) -> int:
        """What the busiest rank sends or receives."""
        return max(*self.balance.sent.values(), *self.balance.received.values())

    def floor_seconds(self, gbps: float) -> float:
        """What no push can be faster than, with a NIC of ``gbps`` Gb/s for each rank."""
        return self.busiest_nbytes * 8 / (gbps * 1e9)


def forecast(push: Push) -> tuple[Plan, Forecast]:
    """Plans a push, and says what it would be.

    Raises:
        FamilyError: sizes don't fit each other or the model.
        QuantError: a format doesn't fit the model or the engine's ranks.
        PlanError: the layouts don't fit each other.
    """
    spent: dict[str, Spent] = {}
    source = _timed(spent, "layouts", lambda: push.trainers.side(push.config))
    held, maxima = _holders(source), 0
    if push.formats:
        edges = _timed(spent, "edges", lambda: Edges(source, push.formats))
        maxima = max(edges.sizes().values(), default=0)
    sides = _timed(spent, "layouts", lambda: _pushed(source, push))
    planned = _timed(spent, "plan", lambda: plan(*sides))
    encoded = _timed(spent, "encoding", planned.to_bytes)
    balance = planned.balance()
    return planned, Forecast(
        parameters=push.config.parameter_count,
        balance=balance,
        once_nbytes=sum(balance.received[group[0]] for group in replica_groups(sides[1])),
        links=len(planned.links()),
        copies=planned.copy_count,
        copies_stored=planned.stored_copy_count,
        encoded_nbytes=len(encoded),
        holders=held,
        exchanged_maxima=maxima,
        derived=tuple(d.name for d in family_of(push.config.kind).derived),
        spent=spent,
        peak_nbytes=peak_nbytes(),
    )


def pushed_sides(push: Push) -> tuple[Side, tuple[Side, Side]]:
    """What trainers hold; what they send, and what rollouts hold.

    Raises:
        FamilyError, QuantError: as :func:`forecast`.
    """
    source = push.trainers.side(push.config)
    return source, _pushed(source, push)


def _pushed(source: Side, push: Push) -> tuple[Side, Side]:
    target = push.rollouts.side(push.config)
    if not push.formats:
        return source, target
    return quantised_source(source, push.formats), quantised_target(target, push.formats)


def _timed(spent: dict[str, Spent], what: str, step: Callable[[], T]) -> T:
    """Adds what a step took to what was spent on its kind."""
    began, cpu = time.perf_counter(), time.process_time()
    result = step()
    before = spent.get(what, Spent(0.0, 0.0))
    spent[what] = Spent(
        before.seconds + time.perf_counter() - began,
        before.cpu_seconds + time.process_time() - cpu,
    )
    return result


def _holders(source: Side) -> dict[int, int]:
    """How much of the model lies on how many ranks."""
    copies: Counter[tuple[str, object]] = Counter()
    nbytes: dict[tuple[str, object], int] = {}
    for leaf in _leaves(source):
        box = leaf.slice or tuple((0, size) for size in leaf.tensor.shape)
        copies[leaf.tensor.name, box] += _replicas(leaf)
        elements = math.prod(length for _, length in box)
        nbytes[leaf.tensor.name, box] = elements * leaf.tensor.dtype.itemsize
    held: Counter[int] = Counter()
    for box_of_tensor, count in copies.items():
        held[count] += nbytes[box_of_tensor]
    return dict(sorted(held.items()))


def _leaves(side: Side) -> Iterator[Leaf]:
    for container in side.containers:
        yield from leaves(container.layout)


def _replicas(leaf: Leaf) -> int:
    dims = zip(leaf.mesh.shape, leaf.placements, strict=True)
    return math.prod(size for size, placement in dims if isinstance(placement, Replicate))


def peak_nbytes(status: Path = Path("/proc/self/status")) -> int:
    """The most memory that this process has held."""
    # Unlike getrusage's figure this one doesn't count what the parent held at the fork.
    with suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Sandboxed kernels (gVisor) have no such line.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
