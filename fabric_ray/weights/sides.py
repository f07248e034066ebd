"""What trainers and rollouts say that they hold, as the planner needs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import ParamMeta, Side, side_from_param_meta
from fabric_ray.plan.errors import DtypeMismatch
from fabric_ray.plan.leaving import tensor_names
from fabric_ray.plan.types import leaves
from fabric_ray.weights.quant import Formats, quantised_source
from fabric_ray.weights.quant.layout import scaled_tensors
from fabric_ray.weights.stacked import unstacked

# Between these, trainers cast.
_FLOATS = frozenset({"float32", "bfloat16", "float16"})


def source_side(
    said: Sequence[list[ParamMeta] | bytes], given: Callable[[], Side], target: Side
) -> Side:
    """What trainers hold: by what each reports, or by the side that all of them were given.

    Args:
        said: a trainer's report, or its side's digest; by rank.
        given: fetches the side.
        target: what rollouts need: second names of tensors that it has no use for are left out,
            and stacks of experts described by what it is made of.

    Raises:
        InvalidArgument: they were given different ones, or one of other ranks.
    """
    reports = {rank: word for rank, word in enumerate(said) if not isinstance(word, bytes)}
    if len(reports) == len(said):
        return unstacked(side_from_param_meta(_once(reports, target)), target)
    for rank, digest in enumerate(said):
        if digest != said[0]:
            raise InvalidArgument(
                f"trainer {rank} was given another side than trainer 0, or none; give all of "
                "them the same side"
            )
    side = given()
    if sorted(side.ranks) != list(range(len(said))):
        raise InvalidArgument(
            f"the trainers' side has ranks {side.ranks}, and there are {len(said)} trainers; "
            "give the side of exactly these trainers"
        )
    return side


def _once(
    reports: Mapping[int, Sequence[ParamMeta]], target: Side
) -> Mapping[int, Sequence[ParamMeta]]:
    """Reports without tied tensors that the target needs under another of their names alone.

    They are the same memory on every rank, so nothing stays behind (RS-1).
    """
    if not any(meta.same_as for metas in reports.values() for meta in metas):
        return reports
    needed = set(tensor_names(target))
    names: dict[str, list[set[str]]] = defaultdict(list)
    for metas in reports.values():
        tied: dict[str, set[str]] = defaultdict(set)
        for meta in metas:
            tied[meta.same_as or meta.name].add(meta.name)
        for meta in metas:
            names[meta.name].append(tied[meta.same_as or meta.name])
    spare = {
        name
        for name, by_rank in names.items()
        if name not in needed and set.intersection(*by_rank) & needed
    }
    return {rank: [m for m in metas if m.name not in spare] for rank, metas in reports.items()}


def converted(source: Side, target: Side, formats: Formats) -> Side:
    """What trainers send instead of what they hold.

    Raises:
        InvalidArgument: nothing at all is converted, or rollouts hold a tensor without its scales.
    """
    if not formats:
        return source
    sent = quantised_source(source, formats)
    if sent == source:
        raise InvalidArgument(
            f"no tensor of the trainers fits any pattern of {sorted(formats)}, or all that do are "
            "of these dtypes; see fabric_ray.weights.quant.linear_formats"
        )
    wanted = set(tensor_names(target))
    for values, scales in scaled_tensors(source, formats):
        if values in wanted and scales not in wanted:
            raise InvalidArgument(
                f"the rollouts hold `{values}` but not its scales `{scales}`; make their side with "
                "quantised_target and the same formats"
            )
    return sent


def with_cast(error: DtypeMismatch, sent: Side, needed: Side) -> DtypeMismatch:
    """The error, with the formats that make trainers cast, if a cast is all that is missing."""
    held, wanted = _dtypes(sent), _dtypes(needed)
    differ = {(held[n], wanted[n]) for n in held.keys() & wanted.keys() if held[n] != wanted[n]}
    if len(differ) != 1 or not _FLOATS.issuperset(*differ):
        return error
    [(_, dtype)] = differ
    told = f'{error}, or have trainers cast it: WeightSync(formats={{"*": Cast("{dtype}")}}), with '
    told += "Cast from fabric_ray.weights.quant"
    return DtypeMismatch(told, tensor=error.tensor, container=error.container, rank=error.rank)


def _dtypes(side: Side) -> dict[str, str]:
    found = (leaf.tensor for c in side.containers for leaf in leaves(c.layout))
    return {tensor.name: tensor.dtype.name for tensor in found}


def target_side(sides: Mapping[int, tuple[int, Side]], missing: set[int]) -> Side:
    """What all rollouts hold.

    Args:
        sides: rank and side, by the rollout's number.
        missing: ranks that nobody need hold.

    Raises:
        InvalidArgument: they were given different sides, or a rank is nobody's.
    """
    first, (_, side) = next(iter(sides.items()))
    for number, (_, other) in sides.items():
        if other != side:
            raise InvalidArgument(
                f"rollout {number} describes another target layout than rollout {first}; give all "
                "of them the same side"
            )
    held = {rank for rank, _ in sides.values()} | missing
    if not held.issuperset(side.ranks):
        raise InvalidArgument(
            f"the rollouts' layout has ranks {side.ranks}, and WeightSync was given "
            f"{len(sides)}; pass one rollout for each rank"
        )
    return side
