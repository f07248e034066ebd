"""The steps in which a rank prepares and sends its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy
from fabric_ray.weights.ring import ALIGN, RingSlice, ring_slices

# Steps that share the watermark: one is prepared while the others are sent.
_STEPS_IN_FLIGHT = 4
# Larger steps are not faster.
_LARGEST_STEP = 64 << 20
# Memory beside prepared tensors: requests, and scratch memory of conversions.
_OVERHEAD = 8 << 20


class Unit(msgspec.Struct, frozen=True):
    """A container that is prepared as a whole, followed by its scales."""

    name: str
    """Of the container."""
    values: int
    """Container index of the values."""
    values_nbytes: int
    scales: int | None = None
    scales_nbytes: int = 0

    @property
    def scales_at(self) -> int:
        """Offset of the scales from the values, in bytes."""
        return _aligned(self.values_nbytes)

    @property
    def nbytes(self) -> int:
        return self.scales_at + _aligned(self.scales_nbytes)


class Step(msgspec.Struct, frozen=True):
    """Tensors that are sent together; the most urgent step is first."""

    units: tuple[Unit, ...]
    """To be prepared before the step is sent."""
    copies: dict[int, list[Copy]]
    """By target rank."""
    ring_slice: RingSlice

    def offsets(self) -> dict[int, int]:
        """Offsets of values and scales in the temporary memory, by container."""
        out, at = {}, self.ring_slice.offset
        for unit in self.units:
            out[unit.values] = at
            if unit.scales is not None:
                out[unit.scales] = at + unit.scales_at
            at += unit.nbytes
        return out


class StepAssignment:
    """Assigns containers to steps. A unit is prepared once for all rollouts.

    Args:
        units: containers to prepare.
        watermark: bytes.
    """

    def __init__(self, units: Sequence[Unit], watermark: int) -> None:
        self._of = _by_container(units)
        self._watermark = watermark
        self._most = min(_LARGEST_STEP, watermark // _STEPS_IN_FLIGHT)
        self._sizes = [0]
        self._at: dict[str, int] = {}
        self.members: list[list[Unit]] = [[]]
        """The units of each step."""

    def step_of(self, container: int) -> int:
        """The step of a container; call it in the order of sending.

        Raises:
            InvalidArgument: the container needs more than the watermark.
        """
        unit = self._of.get(container)
        if unit is None:
            return len(self.members) - 1
        if unit.name not in self._at:
            self._add(unit)
        return self._at[unit.name]

    def ring_slices(self) -> list[RingSlice]:
        """The slice of each step, after all containers are assigned."""
        return ring_slices(self._sizes, self._watermark)

    def _add(self, unit: Unit) -> None:
        if unit.nbytes > self._watermark:
            raise InvalidArgument(
                f"container `{unit.name}` needs {unit.nbytes} bytes to be prepared, expected at "
                f"most the watermark of {self._watermark}; raise the watermark"
            )
        if self.members[-1] and self._sizes[-1] + unit.nbytes > self._most:
            self.members.append([])
            self._sizes.append(0)
        self.members[-1].append(unit)
        self._sizes[-1] += unit.nbytes
        self._at[unit.name] = len(self.members) - 1


def units_budget(units: Iterable[Unit], watermark: int) -> int:
    """Bytes of the watermark for units. The rest is overhead, except where the largest unit needs
    it."""
    rest = watermark - min(_OVERHEAD, watermark // 8)
    return min(watermark, max(rest, *(unit.nbytes for unit in units), 0))


def steps(copies: Iterable[Copy], units: Sequence[Unit], watermark: int) -> list[Step]:
    """Divides a rank's copies into steps, so that prepared bytes stay below the watermark.

    Args:
        copies: in the order of sending.
        units: containers to prepare.
        watermark: bytes.

    Raises:
        InvalidArgument: a container needs more than the watermark.
    """
    assignment = StepAssignment(units, units_budget(units, watermark))
    sent: defaultdict[int, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        sent[assignment.step_of(copy.src_container)][copy.peer].append(copy)
    together = enumerate(zip(assignment.members, assignment.ring_slices(), strict=True))
    return [Step(tuple(m), dict(sent[number]), ring_slice) for number, (m, ring_slice) in together]


def temporary_nbytes(these: Iterable[Step]) -> int:
    """Bytes of temporary memory that steps use."""
    ends = (s.ring_slice.offset + sum(u.nbytes for u in s.units) for s in these)
    return max(ends, default=0)


def _by_container(units: Sequence[Unit]) -> Mapping[int, Unit]:
    of = {unit.values: unit for unit in units}
    return of | {unit.scales: unit for unit in units if unit.scales is not None}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
