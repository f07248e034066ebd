"""A rank's piece of a tensor, in blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
from torch import Tensor

from fabric_ray.weights.quant.blocks import Axis, Zone, axis_of
from fabric_ray.weights.quant.edges import Ids, Shape, grid_ids
from fabric_ray.weights.quant.formats import Scaled, block_of, scale_tensor
from fabric_ray.weights.quant.spans import Piece


class Blocked(msgspec.Struct, frozen=True):
    """A piece of a container, in blocks."""

    piece: Piece
    axes: tuple[Axis, ...]
    grid: Shape
    """Of the whole tensor."""

    @classmethod
    def of(cls, piece: Piece, fmt: Scaled) -> Blocked:
        tensor = piece.leaf.tensor
        axes = map(axis_of, piece.spans, block_of(fmt, tensor.shape), tensor.shape)
        return cls(piece, tuple(axes), scale_tensor(tensor, fmt).shape)

    @property
    def name(self) -> str:
        return self.piece.leaf.tensor.name

    @property
    def touched(self) -> list[tuple[int, ...]]:
        return [axis.touched for axis in self.axes]

    def matrices(self, *tensors: Tensor) -> Iterator[tuple[Shape, tuple[Tensor, ...]]]:
        """Each matrix of the piece: its place, and its parts of tensors shaped like the
        container."""
        parts = [t[box(self.piece.start, self.piece.shape)] for t in tensors]
        for lead in np.ndindex(*self.piece.shape[:-2]):
            yield lead, tuple(part[lead] for part in parts)

    def zones(self) -> Iterator[tuple[Zone, Zone]]:
        return itertools.product(self.axes[-2].zones, self.axes[-1].zones)

    def reduced(self, band: int) -> int:
        """Elements that a band has once each column of a block is one of them."""
        tall = [z.size for z in self.axes[-2].zones if z.count > 1 and z.size > 1]
        return max([self.piece.shape[-1], *(band // size for size in tall)])

    def ids(self, lead: Shape, rows: Zone, columns: Zone) -> Ids:
        """The blocks that zones of a matrix touch."""
        leads = [(axis.touched[i],) for axis, i in zip(self.axes, lead, strict=False)]
        ranges = [tuple(range(z.block, z.block + z.count)) for z in (rows, columns)]
        return grid_ids(self.grid, [*leads, *ranges])


def within(zone: Zone) -> slice:
    return slice(zone.start, zone.start + zone.count * zone.size)


def box(start: Shape, shape: Shape) -> tuple[int | slice, ...]:
    """A part of a container, without the stacked dimensions."""
    stacked = len(start) - len(shape)
    ends = zip(start[stacked:], shape, strict=True)
    return (*start[:stacked], *(slice(s, s + n) for s, n in ends))
