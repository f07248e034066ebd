"""The words of the layout algebra: tensors, meshes, placements, layouts, sides.

All are frozen values. They cross to the native planner as MessagePack arrays of their fields, so
the order of fields is part of the format.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec

from fabric_ray.plan.errors import InvalidLayout

ITEMSIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Bytes per element of dtypes known by name."""


class DType(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An element type; any name will do, elements are never interpreted."""

    name: str
    itemsize: int
    """Bytes of one element."""

    @classmethod
    def of(cls, name: str) -> DType:
        """The dtype of that name in :data:`ITEMSIZES`.

        Raises:
            ValueError: the name isn't known; make a ``DType(name, itemsize)`` instead.
        """
        if name not in ITEMSIZES:
            raise ValueError(f"dtype {name!r} has no known size; pass DType({name!r}, itemsize)")
        return cls(name, ITEMSIZES[name])


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A logical tensor: what all its shards together are."""

    name: str
    shape: tuple[int, ...]
    """Global shape in elements; no dimension may be 0."""
    dtype: DType


class Mesh(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An n-dimensional array of global ranks, row-major."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    """One name per dimension, or none at all."""

    def __post_init__(self) -> None:
        for field, given in (("ranks", self.ranks), ("shape", self.shape), ("names", self.names)):
            if not isinstance(given, (tuple, list)):
                raise InvalidLayout(
                    f"{field} of Mesh is {type(given).__name__}, expected a tuple; give "
                    "Mesh(ranks, shape), or Mesh.line(ranks) for one dimension"
                )

    @classmethod
    def line(cls, ranks: int | Sequence[int], *, name: str | None = None) -> Mesh:
        """A mesh of one dimension over ``ranks`` ranks (a number, or their ids).

        Raises:
            InvalidLayout: ``ranks`` is neither.
        """
        ids = _ids("Mesh.line", ranks)
        return cls(ids, (len(ids),), (name,) if name else ())


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="shard"):
    """Ceil-sized chunks along a tensor dimension, as torch cuts them; late ones may be empty."""

    dim: int


class StridedShard(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="strided_shard"):
    """A part of each of ``split_factor`` chunks: torch's placement of FSDP over TP.

    The dimension is cut into ``split_factor`` chunks, each of them over the mesh dimension.
    """

    dim: int
    split_factor: int


class Replicate(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="replicate"):
    """Every rank along the mesh dimension holds the same."""


class Partial(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="partial"):
    """Ranks hold summands. The planner always refuses it: reduce first."""


Placement = Shard | StridedShard | Replicate | Partial


class Leaf(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="leaf"):
    """A tensor, or a box of it, placed over a mesh."""

    tensor: Tensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    """One per mesh dimension, applied from left to right."""
    slice: tuple[tuple[int, int], ...] | None = None
    """``(start, len)`` per dimension: the box that is placed instead of the whole tensor."""


class Concat(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="concat"):
    """Parts side by side along an axis; parts a rank lacks vanish."""

    axis: int
    parts: tuple[Layout, ...]


class Stack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stack"):
    """Parts of equal shape under a new leading axis; parts a rank lacks vanish."""

    parts: tuple[Layout, ...]


class Pad(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="pad"):
    """A part at the origin of a larger local box; the rest is never read or written."""

    part: Layout
    shape: tuple[int, ...]


Layout = Leaf | Concat | Stack | Pad


class Container(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named local buffer, and how each rank's is built from boxes of tensors."""

    name: str
    dtype: DType
    layout: Layout
    strides: tuple[int, ...] | None = None
    """Bytes between neighbours per local dimension; row-major without gaps when absent."""
    ranks: tuple[int, ...] | None = None
    """The only ranks that have it; every rank of its leaves' meshes when absent. A rank that is
    named has a padded container even where all of it is padding."""


class Side(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All ranks on one end and their containers, the most urgent container first."""

    ranks: tuple[int, ...]
    containers: tuple[Container, ...]

    @classmethod
    def of(cls, ranks: int | Sequence[int], containers: Sequence[Container]) -> Side:
        """A side of ``ranks`` ranks (a number, or their ids).

        Raises:
            InvalidLayout: ``ranks`` is neither.
        """
        return cls(_ids("Side.of", ranks), tuple(containers))


def _ids(call: str, ranks: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, range(ranks) if isinstance(ranks, int) else ranks))
    except TypeError:
        raise InvalidLayout(
            f"ranks of {call} is {type(ranks).__name__} {ranks!r:.60}, expected a number of ranks "
            "or a sequence of rank ids; give 1 for one rank, or range(8) for eight"
        ) from None


def leaves(layout: Layout) -> list[Leaf]:
    """All leaves of a layout, in order."""
    if isinstance(layout, Leaf):
        return [layout]
    if isinstance(layout, Pad):
        return leaves(layout.part)
    return [leaf for part in layout.parts for leaf in leaves(part)]
