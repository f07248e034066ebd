"""The planner's sides, from the metadata of trainers and rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import ParamMeta, Side, side_from_param_meta
from fabric_ray.plan.errors import MissingTensors
from fabric_ray.plan.leaving import several, tensor_names
from fabric_ray.weights.quant import Formats, quantised_source
from fabric_ray.weights.quant.layout import scaled_tensors
from fabric_ray.weights.self_described import on_all
from fabric_ray.weights.stacked import unstacked


def source_side(
    metas: Sequence[list[ParamMeta] | bytes], given: Callable[[], Side], target: Side
) -> Side:
    """The trainers' side, from their reports or from the side that all of them were given.

    Args:
        metas: by rank, a trainer's report or the digest of its side.
        given: fetches the side.
        target: the rollouts' side. Tied names that it doesn't use are left out, and stacks of
            experts are described by their experts where it holds those.

    Raises:
        InvalidArgument: the sides differ, or have other ranks than the trainers.
    """
    reports = {rank: report for rank, report in enumerate(metas) if not isinstance(report, bytes)}
    if len(reports) == len(metas):
        return unstacked(side_from_param_meta(_without_ties(reports, target)), target)
    for rank, digest in enumerate(metas):
        if digest != metas[0]:
            raise InvalidArgument(
                f"trainer {rank} has another side than trainer 0, or none; give all trainers the "
                "same side"
            )
    side = given()
    if sorted(side.ranks) != list(range(len(metas))):
        raise InvalidArgument(
            f"the trainers' side has ranks {side.ranks}, expected {len(metas)} ranks from 0; give "
            "the side of exactly these trainers"
        )
    return side


def _without_ties(
    reports: Mapping[int, Sequence[ParamMeta]], target: Side
) -> Mapping[int, Sequence[ParamMeta]]:
    """Reports without tied names that the target doesn't use, if it uses another of their names.

    All names share memory on every rank, so the target gets all values (RS-1).
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
    """The trainers' side after conversion.

    Raises:
        InvalidArgument: no tensor is converted, or rollouts hold a tensor without its scales.
    """
    if not formats:
        return source
    sent = quantised_source(source, formats)
    if sent == source:
        raise InvalidArgument(
            f"formats convert nothing: no tensor of the trainers matches a pattern of "
            f"{sorted(formats)}, or all matches have these dtypes already; see "
            "fabric_ray.weights.quant.linear_formats"
        )
    wanted = set(tensor_names(target))
    for values, scales in scaled_tensors(source, formats):
        if values in wanted and scales not in wanted:
            raise InvalidArgument(
                f"the rollouts hold `{values}` but not its scales `{scales}`; make their side with "
                "quantised_target and the same formats"
            )
    return sent


def lacking(error: MissingTensors, sent: Side, needed: Side) -> MissingTensors:
    """The error, with what to do about the ends of a push."""
    names = dict.fromkeys(tensor_names(sent))
    wanted = dict.fromkeys(tensor_names(needed))
    missing = wanted.keys() - names.keys()
    unused = [name for name in names if name not in wanted]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return MissingTensors(
        f"no trainer holds tensor `{error.tensor}`{more}, which container `{error.container}` of "
        f"rollout rank {error.rank} needs{_other_spelling(error.tensor, unused)}; give it to a "
        "WeightSource: the module itself, since "
        "named_parameters() leaves buffers out. Or take the container out of the rollouts' side "
        "(with WeightTarget(into=), also out of the module: a buffer by persistent=False); what is "
        "taken out keeps its values, so nothing that is trained there arrives",
        tensor=error.tensor,
        container=error.container,
        rank=error.rank,
    )


def _other_spelling(missing: str | None, unused: Sequence[str]) -> str:
    """What trainers hold and no rollout needs, the names most like the missing one first."""
    if not unused:
        return ""
    near = get_close_matches(missing or "", unused, n=3)
    said = several([*near, *(name for name in unused if name not in near)])
    return f", and no rollout needs the trainers' {said}: correct the name if one of them is meant"


def as_replicas(
    held: Mapping[int, tuple[int, Side]], ranks: Mapping[int, int], rollouts: int
) -> dict[int, tuple[int, Side]]:
    """Ranks and sides by number, where each of several rollouts may hold a whole model as rank 0 of
    1: that is one side, in which all are replicas.

    Args:
        ranks: of these in that side, by the rollout's number.
        rollouts: ranks of that side.
    """
    if rollouts == 1 or any(side.ranks != (0,) for _, side in held.values()):
        return dict(held)
    sides: list[tuple[Side, Side]] = []
    for _, side in held.values():
        if not any(side == one for one, _ in sides):
            sides.append((side, on_all(side, rollouts)))
    wide = {
        number: next(w for one, w in sides if one == side) for number, (_, side) in held.items()
    }
    return {number: (ranks[number], wide[number]) for number in held}


def target_side(sides: Mapping[int, tuple[int, Side]], missing: set[int]) -> Side:
    """The rollouts' side.

    Args:
        sides: rank and side, by the rollout's number.
        missing: ranks that may have no rollout.

    Raises:
        InvalidArgument: the sides differ, or a rank has no rollout.
    """
    first, (_, side) = next(iter(sides.items()))
    for number, (_, other) in sides.items():
        if other != side:
            raise InvalidArgument(
                f"rollout {number} has another side than rollout {first}; give all rollouts the "
                "same side"
            )
    held = {rank for rank, _ in sides.values()} | missing
    if not held.issuperset(side.ranks):
        raise InvalidArgument(
            f"the rollouts' side has ranks {side.ranks}, but WeightSync got {len(sides)} "
            "rollouts; pass one rollout for each rank"
        )
    return side
