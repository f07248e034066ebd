"""How many ranks can share a parameter, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fabric_ray.models.config import ModelConfig, Shape
from fabric_ray.weights.families.errors import Indivisible, InvalidRanks
from fabric_ray.weights.families.matching import Match
from fabric_ray.weights.families.rules import Family, Split

_TP_OFFERED = 256
"""Error messages offer sizes up to here."""


def replica_sizes(tp: int, dp: int) -> str:
    """The sizes of a replica, for errors."""
    return f"tp={tp}" if dp == 1 else f"tp={tp} times dp={dp}"


_MOST_RANKS = 1 << 20


def parallel_sizes(config: ModelConfig, family: Family, *, tp: int, ep: int, dp: int) -> None:
    """Checks the sizes alone.

    Raises:
        InvalidRanks: they mean nothing for this model.
        Indivisible: there are fewer experts than ranks to own them.
    """
    if min(tp, ep, dp) < 1:
        raise InvalidRanks(f"tp={tp}, ep={ep} and dp={dp} must be 1 or more", family=family.name)
    size = tp * dp
    if max(size, ep) > _MOST_RANKS:
        raise InvalidRanks(
            f"a replica of {replica_sizes(tp, dp)} with ep={ep} has too many ranks; use at most "
            f"{_MOST_RANKS}",
            family=family.name,
        )
    if size % ep:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise InvalidRanks(
            f"ep={ep} doesn't divide {replica_sizes(tp, dp)}; use ep={_either(divisors)}",
            family=family.name,
        )
    experts = config.moe.experts if config.moe else 0
    if ep > 1 and not experts:
        raise InvalidRanks(f"{family.name} has no experts to spread; use ep=1", family=family.name)
    if ep > 1 and ep > experts:
        raise Indivisible(
            f"{family.name}: {experts} experts can't be spread over ep={ep} ranks; use at most "
            f"ep={experts}",
            family=family.name,
            allowed=tuple(n for n in range(1, experts + 1) if size % n == 0),
        )


def owned_experts(experts: int, ep: int, index: int) -> range:
    """The experts of one expert-parallel rank: consecutive, the first ranks take the remainder."""
    each, more = divmod(experts, ep)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def shares(config: ModelConfig, cut: Split, shape: Shape, ways: int) -> tuple[int, int] | None:
    """``(different shares, ranks that hold each)``, or ``None`` if it can't be done evenly."""
    units = _units(config, cut, shape)
    if shape[cut.dim] % (cut.chunks * units):
        return None
    if units % ways == 0:
        return ways, 1
    if cut.unit == "kv_heads" and ways % units == 0:
        return units, ways // units
    return None


def _units(config: ModelConfig, cut: Split, shape: Shape) -> int:
    """What is shared of each of the cut's chunks."""
    columns = shape[cut.dim] // cut.chunks
    return {"heads": config.heads, "kv_heads": config.kv_heads, "column": columns}[cut.unit]


def check_shares(
    config: ModelConfig,
    family: Family,
    matches: Sequence[Match],
    shapes: dict[str, Shape],
    *,
    tp: int,
    ep: int,
    dp: int,
) -> None:
    """Refuses what the ranks can't share evenly.

    Raises:
        Indivisible: names the parameter, and the tensor-parallel sizes that would do.
    """
    splits = list(_splits(matches))

    def ways_of(tp: int, per_expert: bool) -> int:
        return tp * dp // ep if per_expert else tp

    for name, cut, per_expert in splits:
        ways = ways_of(tp, per_expert)
        if shares(config, cut, shapes[name], ways) is None:
            allowed = [
                n
                for n in range(1, _TP_OFFERED + 1)
                if n * dp % ep == 0
                and all(
                    shares(config, c, shapes[p], ways_of(n, e)) is not None for p, c, e in splits
                )
            ]
            unit = cut.unit.replace("_", " ")
            size = shapes[name][cut.dim]
            count = _units(config, cut, shapes[name])
            each = f"{'' if cut.chunks == 1 else f'each of the {cut.chunks} parts of '}{name}"
            raise Indivisible(
                f"{family.name}: the {count} {unit.removesuffix('s')}s of {each} (dimension "
                f"{cut.dim}, size {size}) can't be shared evenly by {ways} ranks; "
                + (f"use tp={_either(allowed)}" if allowed else f"no tp does with ep={ep}")
                + (f" with ep={ep}" if allowed and ep > 1 else ""),
                family=family.name,
                parameter=name,
                allowed=tuple(allowed),
            )


def _splits(matches: Sequence[Match]) -> Iterator[tuple[str, Split, bool]]:
    """A parameter for each cut that occurs; layers and experts repeat each other."""
    seen = set()
    for found in matches:
        for part, name in zip(found.rule.parts, found.members[0], strict=True):
            if isinstance(part.cut, Split) and part not in seen:
                seen.add(part)
                yield name, part.cut, found.rule.per_expert


def _either(values: Sequence[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
