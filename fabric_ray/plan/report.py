"""What each rank says about its parameters, and the side that all reports make together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from fabric_ray.plan.errors import InconsistentReports, InvalidLayout
from fabric_ray.plan.types import (
    Container,
    DType,
    Leaf,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Side,
    StridedShard,
    Tensor,
)


class ParamMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's word on one parameter: what the whole is and which part lies here."""

    name: str
    shape: tuple[int, ...]
    """Global, in elements."""
    dtype: DType
    mesh_ranks: tuple[int, ...]
    """Global ranks, row-major over ``mesh_shape``."""
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """One per mesh dimension."""
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]
    """Bytes between neighbours, per dimension of the local tensor."""
    mesh_names: tuple[str, ...] = ()
    same_as: str = ""
    """Another parameter of the rank, of which this is a second name (tied embeddings)."""
    adapters: tuple[str, ...] = ()
    """Adapters that each push adds to a copy of it."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "mesh_ranks", _shared(self.mesh_ranks))

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.mesh_ranks, self.mesh_shape, self.mesh_names)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The local strides, or ``None`` where they are row-major without gaps."""
        dense = _is_dense(self.local_shape, self.local_strides, self.dtype.itemsize)
        return None if dense else self.local_strides

    def expected_local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape that the placements give ``rank``, which must be in the mesh."""
        position = self.mesh_ranks.index(rank)
        return _local_shape(self.shape, self.mesh_shape, self.placements, position)

    def local_runs(self, rank: int) -> list[list[tuple[int, int]]]:
        """Per dimension, start and length of each run of indices that ``rank`` holds."""
        position = self.mesh_ranks.index(rank)
        return local_runs(self.shape, self.mesh_shape, self.placements, position)


@lru_cache(maxsize=256)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """One object for equal meshes, so that thousands of reports hold it once."""
    return ranks


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def _local_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    position: int,
) -> tuple[int, ...]:
    local = list(shape)
    coords = []
    for size in reversed(mesh_shape):
        coords.append(position % size)
        position //= size
    for coord, ways, placement in zip(reversed(coords), mesh_shape, placements, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = _chunk(local[placement.dim], ways, coord)
        elif isinstance(placement, StridedShard):
            size, factor = local[placement.dim], placement.split_factor
            local[placement.dim] = sum(
                _chunk(_chunk(size, factor, block), ways, coord)
                for block in range(min(size, factor))
            )
    return tuple(local)


def local_runs(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    position: int,
) -> list[list[tuple[int, int]]]:
    """Per dimension, start and length of each run of indices at a position of a mesh."""
    runs = [[(0, size)] for size in shape]
    coords = []
    for size in reversed(mesh_shape):
        coords.append(position % size)
        position //= size
    for coord, ways, placement in zip(reversed(coords), mesh_shape, placements, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            runs[placement.dim] = _share(runs[placement.dim], ways, coord, factor)
    return runs


def _share(
    runs: list[tuple[int, int]], ways: int, index: int, factor: int
) -> list[tuple[int, int]]:
    """One of ``ways`` chunks of each of ``factor`` chunks of indices."""
    total = sum(length for _, length in runs)
    out: list[tuple[int, int]] = []
    for block in range(factor):
        begin, size = _start(total, factor, block), _chunk(total, factor, block)
        begin, size = begin + _start(size, ways, index), _chunk(size, ways, index)
        at = 0
        for start, length in runs:
            low, high = max(begin, at), min(begin + size, at + length)
            if low < high:
                if out and sum(out[-1]) == start + low - at:
                    out[-1] = (out[-1][0], out[-1][1] + high - low)
                else:
                    out.append((start + low - at, high - low))
            at += length
    return out


def _start(size: int, ways: int, index: int) -> int:
    return min(size, -(-size // ways) * index)


def _chunk(size: int, ways: int, index: int) -> int:
    """Elements in one of ``ways`` chunks, as torch cuts them."""
    step = -(-size // ways)
    return max(0, min(size, step * (index + 1)) - step * index)


def side_from_param_meta(reports: Mapping[int, Sequence[ParamMeta]]) -> Side:
    """Merges what every rank reported into one side.

    Containers bear the parameters' names and come in the order in which the lowest rank that has
    them reported them. Reports of one name on disjoint meshes (replicas of each other, such as an
    unsharded norm under tensor parallelism) become one container with a further, replicated mesh
    dimension. Ranks whose local strides differ get containers of their own.

    Args:
        reports: per global rank, its parameters.

    Raises:
        InconsistentReports: ranks contradict each other or themselves; names them and the fields.
    """
    by_name: dict[str, dict[int, ParamMeta]] = {}
    for rank in sorted(reports):
        for meta in reports[rank]:
            named = by_name.setdefault(meta.name, {})
            if rank in named:
                raise InconsistentReports(
                    f"parameter `{meta.name}`: rank {rank} reports it twice; give the parameters "
                    "of a rank distinct names",
                    tensor=meta.name,
                    rank=rank,
                )
            named[rank] = meta
    containers: list[Container] = []
    for name, named in by_name.items():
        containers.extend(_containers(name, named))
    return Side.of(sorted(reports), containers)


def _containers(name: str, reports: dict[int, ParamMeta]) -> Iterable[Container]:
    first_rank, first = next(iter(reports.items()))
    meshes: dict[tuple[int, ...], None] = {}
    by_strides: dict[tuple[int, ...] | None, list[int]] = {}
    for rank, meta in reports.items():
        _check(name, (first_rank, first), (rank, meta))
        meshes.setdefault(meta.mesh_ranks)
        by_strides.setdefault(meta.strides, []).append(rank)
    members = [rank for mesh in meshes for rank in mesh]
    if len(members) != len(set(members)):
        twice = sorted({rank for rank in members if members.count(rank) > 1})
        raise _contradiction(name, twice, "mesh_ranks", "their meshes overlap but differ")
    silent = sorted(set(members) - set(reports))
    if silent:
        raise _contradiction(name, silent, "mesh_ranks", "they are in its mesh but don't report it")
    mesh, placements = first.mesh, first.placements
    if len(meshes) > 1:
        names = ("replica", *first.mesh_names) if first.mesh_names else ()
        mesh = Mesh(tuple(members), (len(meshes), *first.mesh_shape), names)
        placements = (Replicate(), *placements)
    leaf = Leaf(Tensor(name, first.shape, first.dtype), mesh, placements)
    for strides, ranks in by_strides.items():
        only = None if len(by_strides) == 1 else tuple(ranks)
        yield Container(name, first.dtype, leaf, strides, only)


def _check(name: str, first: tuple[int, ParamMeta], other: tuple[int, ParamMeta]) -> None:
    rank, meta = other
    for field in ("shape", "dtype", "mesh_shape", "placements"):
        first_value, value = getattr(first[1], field), getattr(meta, field)
        if first_value != value:
            raise _contradiction(name, [first[0], rank], field, f"{first_value} and {value}")
    problem = _problem(
        rank,
        meta.shape,
        meta.mesh_ranks,
        meta.mesh_shape,
        meta.placements,
        meta.local_shape,
        meta.local_strides,
    )
    if problem is not None:
        _check_even(name, rank, meta)
        raise _contradiction(name, [rank], *problem)


def _check_even(name: str, rank: int, meta: ParamMeta) -> None:
    """Raises InvalidLayout where FSDP has cut unequal shards of tensor parallelism: for these, and
    for the chunks of chunks that it says, torch has the same placements."""
    for at, placement in enumerate(meta.placements):
        if not isinstance(placement, StridedShard):
            continue
        dim, size = placement.dim, meta.shape[placement.dim]
        later = zip(meta.mesh_shape[at + 1 :], meta.placements[at + 1 :], strict=True)
        ways = math.prod(ways for ways, other in later if other == Shard(dim))
        if ways == placement.split_factor and size % ways:
            raise InvalidLayout(
                f"parameter `{name}` of shape {list(meta.shape)}: FSDP cuts dimension {dim} after "
                f"tensor parallelism has cut it {ways} ways, which is supported where {ways} "
                f"divides it, and {size} is no multiple; have fully_shard cut another dimension "
                "(shard_placement_fn), or pad this one",
                tensor=name,
                rank=rank,
            )


# The parameters of a model are many, the ways in which a rank holds them few.
@lru_cache(maxsize=1 << 16)
def _problem(
    rank: int,
    shape: tuple[int, ...],
    mesh_ranks: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
    local_strides: tuple[int, ...],
) -> tuple[str, str] | None:
    """The field in which a report contradicts itself, and how."""
    if rank not in mesh_ranks:
        return "mesh_ranks", "it isn't in the mesh it reports"
    if math.prod(mesh_shape) != len(mesh_ranks):
        return "mesh_shape", f"{mesh_shape} isn't the shape of {len(mesh_ranks)} ranks"
    if len(placements) != len(mesh_shape):
        return "placements", "it needs one per mesh dimension"
    sharded = [p.dim for p in placements if isinstance(p, (Shard, StridedShard))]
    if any(not 0 <= dim < len(shape) for dim in sharded):
        return "placements", f"the tensor has no dimension {sharded}"
    expected = _local_shape(shape, mesh_shape, placements, mesh_ranks.index(rank))
    if expected != local_shape:
        return "local_shape", f"{local_shape}, but its placements give {expected}"
    if len(local_strides) != len(local_shape):
        return "local_strides", "it needs one per dimension"
    return None


def _contradiction(name: str, ranks: list[int], field: str, problem: str) -> InconsistentReports:
    reporters = "rank " + ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return InconsistentReports(
        f"parameter `{name}`, {reporters}, field {field}: {problem}; "
        "make all ranks report what they hold of the same model",
        tensor=name,
        rank=ranks[0],
    )
