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


def steps(copies: Iterable[Copy], units: Sequence[Unit], watermark: int) -> list[Step]:
    """Divides a rank's copies into steps, so that what is made ready but not sent stays below the
    watermark. A unit is made ready once, whoever gets it.

    Args:
        copies: in the order in which they should be sent.
        units: containers that aren't sent from where they lie.
        watermark: bytes.

    Raises:
        InvalidArgument: a container needs more than the watermark.
    """
    of = _by_container(units)
    most = min(_LARGEST_STEP, watermark // _STEPS_UNDER_WAY)
    members: list[list[Unit]] = [[]]
    sizes = [0]
    sent: list[dict[int, list[Copy]]] = [defaultdict(list)]
    at: dict[str, int] = {}
    for copy in copies:
        unit = of.get(copy.src_container)
        if unit is not None and unit.name not in at:
            if unit.nbytes > watermark:
                raise InvalidArgument(
                    f"container `{unit.name}` takes {unit.nbytes} bytes when it is made ready, "
                    f"more than the watermark of {watermark}; raise the watermark to that"
                )
            if members[-1] and sizes[-1] + unit.nbytes > most:
                members.append([])
                sizes.append(0)
                sent.append(defaultdict(list))
            members[-1].append(unit)
            sizes[-1] += unit.nbytes
            at[unit.name] = len(members) - 1
        step = len(members) - 1 if unit is None else at[unit.name]
        sent[step][copy.peer].append(copy)
    together = zip(members, sent, places(sizes, watermark), strict=True)
    return [Step(tuple(m), dict(s), place) for m, s, place in together]


def temporary_nbytes(these: Iterable[Step]) -> int:
    """Bytes of temporary memory that steps use."""
    ends = (s.place.offset + sum(u.nbytes for u in s.units) for s in these)
    return max(ends, default=0)


def _by_container(units: Sequence[Unit]) -> Mapping[int, Unit]:
    of = {unit.values: unit for unit in units}
    return of | {unit.scales: unit for unit in units if unit.scales is not None}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
