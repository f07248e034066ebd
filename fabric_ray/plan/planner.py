"""Planning, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fabric_ray._native import PlanCore
from fabric_ray.plan.copies import Copies
from fabric_ray.plan.errors import ExtraTensors, InvalidLayout
from fabric_ray.plan.leaving import check_patterns, left_behind, tensor_names
from fabric_ray.plan.types import Side

SideName = Literal["source", "target"]


def encoded(side: Side, role: SideName) -> bytes:
    """A side as the core reads it.

    Raises:
        InvalidLayout: a number in it is beyond 64 bits.
    """
    try:
        return msgspec.msgpack.encode(side)
    except OverflowError as error:
        raise InvalidLayout(
            f"{role} side: a rank or size is beyond 64 bits ({error}); give smaller ones"
        ) from None


class Link(msgspec.Struct, frozen=True):
    """What moves from one source rank to one target rank."""

    src: int
    dst: int
    nbytes: int
    pages: int
    copies: int


class Balance(msgspec.Struct, frozen=True):
    """How evenly bytes lie on senders, receivers and links; 1.0 is even."""

    nbytes: int
    sent: dict[int, int]
    """Bytes per source rank."""
    received: dict[int, int]
    sender_imbalance: float
    """Busiest source rank over the mean of all source ranks."""
    receiver_imbalance: float
    link_imbalance: float
    """Busiest pair of ranks over the mean of the pairs that exchange anything."""


class LocalContainer(msgspec.Struct, frozen=True):
    """A container as one rank has it."""

    index: int
    """Position in the side's containers: how copies name it."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between neighbours, per dimension."""
    nbytes: int
    """From the first byte of the buffer to past the last one the layout uses."""


class Plan:
    """All copies that fill a target side's containers from a source side's.

    Immutable, hashable, equal on every host that planned the same sides.
    """

    __slots__ = ("_core",)

    def __init__(self, core: PlanCore) -> None:
        self._core = core

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            PlanError: the bytes are damaged or of another version.
        """
        return cls(PlanCore.from_bytes(data))

    def to_bytes(self) -> bytes:
        """The plan and both layouts; equal plans give equal bytes."""
        return self._core.to_bytes()

    def digest(self) -> int:
        """64 bits by which hosts can tell that they hold the same plan."""
        return self._core.digest()

    def ranks(self, side: SideName) -> tuple[int, ...]:
        return tuple(self._core.ranks(side))

    def containers(self, side: SideName) -> tuple[str, ...]:
        """Names, in the order that copies index."""
        return tuple(name for name, _ in self._core.containers(side))

    def local_containers(self, side: SideName, rank: int) -> tuple[LocalContainer, ...]:
        """The buffers a rank must bring, with their sizes.

        Raises:
            UnknownRank: the side has no such rank.
        """
        names = self._core.containers(side)
        return tuple(
            LocalContainer(index, *names[index], tuple(shape), tuple(strides), nbytes)
            for index, shape, strides, nbytes in self._core.local_containers(side, rank)
        )

    def for_source(self, rank: int) -> Copies:
        """What a source rank sends, in the order it should.

        Most urgent target container first; within one, targets in turn, each source starting
        with another.

        Raises:
            UnknownRank: the rank is no source.
        """
        return Copies.from_columns(self._core.for_source(rank))

    def sending_order(self, rank: int) -> list[int]:
        """A source rank's containers of which anything is sent, in the order of :meth:`for_source`.

        Raises:
            UnknownRank: the rank is no source.
        """
        return self._core.sending_order(rank)

    def for_target(self, rank: int) -> Copies:
        """What a target rank receives.

        Raises:
            UnknownRank: the rank is no target.
        """
        return Copies.from_columns(self._core.for_target(rank))

    def links(self) -> tuple[Link, ...]:
        """Every pair of ranks that exchange anything, by source, then target."""
        return tuple(Link(*fields) for fields in self._core.links())

    def bytes_on_link(self, src: int, dst: int) -> int:
        return self._core.bytes_on_link(src, dst)

    def expected_pages(self, dst: int) -> int:
        """Runs that a target rank receives: what its counter must reach.

        Raises:
            UnknownRank: the rank is no target.
        """
        return self._core.expected_pages(dst)

    def balance(self) -> Balance:
        total, sent, received, imbalances = self._core.balance()
        return Balance(total, dict(sent), dict(received), *imbalances)

    @property
    def copy_count(self) -> int:
        """Copies over all links."""
        return self._core.counts()[0]

    @property
    def stored_copy_count(self) -> int:
        """Copies kept; links that carry equal lists share one."""
        return self._core.counts()[1]

    def explain(self, tensor_or_container: str | None = None, *, rank: int | None = None) -> str:
        """The plan as text: the sender and receiver of each box, and why that replica sends it.

        Without arguments a summary; with a tensor's or container's name, a target rank or both,
        every box that concerns them.

        Raises:
            PlanError: nothing has that name, or the rank is no target.
        """
        return self._core.explain(tensor_or_container, rank)

    def to_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """The plan as JSON-able values; ``copies=False`` leaves the lists of copies out."""
        balance = self.balance()
        out: dict[str, Any] = {
            "digest": f"{self.digest():016x}",
            "source": {"ranks": self.ranks("source"), "containers": self.containers("source")},
            "target": {"ranks": self.ranks("target"), "containers": self.containers("target")},
            "balance": msgspec.to_builtins(balance, str_keys=True),
            "links": [msgspec.to_builtins(link) for link in self.links()],
        }
        if copies:
            out["copies"] = {
                str(rank): [msgspec.to_builtins(copy) for copy in self.for_source(rank)]
                for rank in self.ranks("source")
            }
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._core.equals(other._core)

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return Plan.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        balance = self.balance()
        return (
            f"Plan({len(self.ranks('source'))} -> {len(self.ranks('target'))} ranks, "
            f"{balance.nbytes} bytes, {self.copy_count} copies, digest {self.digest():016x})"
        )


def plan(
    source: Side,
    target: Side,
    *,
    leave: Sequence[str] = (),
    min_split_bytes: int = 256 << 10,
) -> Plan:
    """Plans the copies that fill every target container from the source containers.

    Every box of every target container is sent exactly once. Where several source ranks hold a
    box, the least loaded sends it; one of more than ``min_split_bytes`` may be cut over several of
    them. Hosts that pass equal arguments get equal plans.

    Args:
        source: the layout of the senders.
        target: the layout of the receivers, the most urgent container first.
        leave: patterns of names of source tensors that may stay behind, since no target needs
            them, such as ``("draft.*",)``. Any other that no target needs is refused.
        min_split_bytes: bytes.

    Raises:
        PlanError: one of its subclasses, which names tensor, container and rank.
        InvalidArgument: a pattern of ``leave`` names no tensor, or one that a target needs.
    """
    leave = check_patterns(leave)
    if min_split_bytes < 0:
        raise ValueError(f"min_split_bytes is {min_split_bytes}; give 0 or more bytes")
    try:
        core = PlanCore.build(
            encoded(source, "source"), encoded(target, "target"), bool(leave), min_split_bytes
        )
    except ExtraTensors:
        left_of(source, target, leave)
        raise
    if leave:
        left_of(source, target, leave)
    return Plan(core)


def left_of(source: Side, target: Side, leave: Sequence[str]) -> tuple[str, ...]:
    """Names of the source's tensors that no target container needs.

    Raises:
        ExtraTensors, InvalidArgument: as :func:`plan`, which refuses them.
    """
    return left_behind(tensor_names(source), set(tensor_names(target)), leave)
