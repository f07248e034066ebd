"""In which steps a rank makes its tensors ready and sends them, and where they lie meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy
from fabric_ray.weights.watermark import ALIGN, Place, places

# Of the watermark: while some steps are being sent, another is made ready.
_STEPS_UNDER_WAY = 4
# More at once gains nothing.
_LARGEST_STEP = 64 << 20
# What a trainer takes besides what it has made ready: requests, working memory of conversions.
_BESIDE = 8 << 20


class Unit(msgspec.Struct, frozen=True):
    """What is made ready as a whole: a converted container, and its scales behind it."""

    name: str
    """Of the container."""
    values: int
    """Index of its values among the containers that copies name."""
    values_nbytes: int
    scales: int | None = None
    scales_nbytes: int = 0

    @property
    def scales_at(self) -> int:
        """Bytes from where the values begin."""
        return _aligned(self.values_nbytes)

    @property
    def nbytes(self) -> int:
        return self.scales_at + _aligned(self.scales_nbytes)


class Step(msgspec.Struct, frozen=True):
    """Tensors that are sent together, most urgent step first."""

    units: tuple[Unit, ...]
    """To be made ready first; none where all is sent from where it lies."""
    copies: dict[int, list[Copy]]
    """By target rank."""
    place: Place

    def offsets(self) -> dict[int, int]:
        """Where the values and scales of each unit begin in the temporary memory, by container."""
        out, at = {}, self.place.offset
        for unit in self.units:
            out[unit.values] = at
            if unit.scales is not None:
                out[unit.scales] = at + unit.scales_at
            at += unit.nbytes
        return out


class Division:
    """Which step each container goes with. A unit is made ready once, whoever gets it.

    Args:
        units: containers that aren't sent from where they lie.
        watermark: bytes.
    """

    def __init__(self, units: Sequence[Unit], watermark: int) -> None:
        self._of = _by_container(units)
        self._watermark = watermark
        self._most = min(_LARGEST_STEP, watermark // _STEPS_UNDER_WAY)
        self._sizes = [0]
        self._at: dict[str, int] = {}
        self.members: list[list[Unit]] = [[]]
        """The units of each step."""

    def step_of(self, container: int) -> int:
        """To be asked in the order of sending.

        Raises:
            InvalidArgument: it needs more than the watermark.
        """
        unit = self._of.get(container)
        if unit is None:
            return len(self.members) - 1
        if unit.name not in self._at:
            self._add(unit)
        return self._at[unit.name]

    def places(self) -> list[Place]:
        """Where each step lies, when all containers are divided."""
        return places(self._sizes, self._watermark)

    def _add(self, unit: Unit) -> None:
        if unit.nbytes > self._watermark:
            raise InvalidArgument(
                f"container `{unit.name}` takes {unit.nbytes} bytes when it is made ready, "
                f"more than the watermark of {self._watermark}; raise the watermark to that"
            )
        if self.members[-1] and self._sizes[-1] + unit.nbytes > self._most:
            self.members.append([])
            self._sizes.append(0)
        self.members[-1].append(unit)
        self._sizes[-1] += unit.nbytes
        self._at[unit.name] = len(self.members) - 1


def room(units: Iterable[Unit], watermark: int) -> int:
    """Bytes of the watermark in which units are made ready. The rest is left to what a push takes
    besides, except where the largest unit needs it.
    """
    rest = watermark - min(_BESIDE, watermark // 8)
    return min(watermark, max(rest, *(unit.nbytes for unit in units), 0))


def steps(copies: Iterable[Copy], units: Sequence[Unit], watermark: int) -> list[Step]:
    """Divides a rank's copies into steps, so that what is made ready but not sent stays below the
    watermark.

    Args:
        copies: in the order in which they should be sent.
        units: containers that aren't sent from where they lie.
        watermark: bytes.

    Raises:
        InvalidArgument: a container needs more than the watermark.
    """
    division = Division(units, room(units, watermark))
    sent: defaultdict[int, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        sent[division.step_of(copy.src_container)][copy.peer].append(copy)
    together = enumerate(zip(division.members, division.places(), strict=True))
    return [Step(tuple(m), dict(sent[number]), place) for number, (m, place) in together]


def temporary_nbytes(these: Iterable[Step]) -> int:
    """Bytes of temporary memory that steps use."""
    ends = (s.place.offset + sum(u.nbytes for u in s.units) for s in these)
    return max(ends, default=0)


def _by_container(units: Sequence[Unit]) -> Mapping[int, Unit]:
    of = {unit.values: unit for unit in units}
    return of | {unit.scales: unit for unit in units if unit.scales is not None}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
