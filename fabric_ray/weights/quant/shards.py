"""Quantising what one rank holds: partial maxima first, then one container after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from fabric_ray.plan.types import Container, Side
from fabric_ray.weights.quant import arithmetic, bands
from fabric_ray.weights.quant.edges import Edges, Ids, RankEdges, Shape, grid_ids
from fabric_ray.weights.quant.errors import QuantError
from fabric_ray.weights.quant.formats import (
    Cast,
    Format,
    Formats,
    Scaled,
    format_of,
    scale_dtype,
    scale_tensor,
    suffix,
)
from fabric_ray.weights.quant.layout import source_scales
from fabric_ray.weights.quant.pieces import Blocked, box, within
from fabric_ray.weights.quant.spans import Piece, place


class RankQuantiser:
    """Turns what one rank holds into what :func:`quantised_source` says it holds.

    A push is :meth:`partial_maxima`, the exchange with other ranks where ``edges.partners`` names
    any, then :meth:`Preparation.prepare` for each container.

    Args:
        side: the trainers' plain side.
        formats: what becomes of which tensors.
        rank: this rank.
        edges: of the same side and formats, if at hand.
        band: elements that are converted at a time; the default fits a core's cache. Temporary
            memory is 4 bytes for each.

    Raises:
        UnsupportedFormat: as :func:`quantised_source`.
    """

    def __init__(
        self,
        side: Side,
        formats: Formats,
        rank: int,
        *,
        edges: Edges | None = None,
        band: int = 1 << 18,
    ) -> None:
        self.edges: RankEdges = (edges or Edges(side, formats)).of_rank(rank)
        self.preparations: dict[str, Preparation] = {}
        """By container; what isn't converted has none."""
        for container in side.containers:
            fmt = format_of(container, formats)
            if fmt is None or fmt.element == container.dtype:
                continue
            if container.ranks is None or rank in container.ranks:
                placed = place(container.layout, rank)
                if placed is not None and all(placed[0]):
                    preparation = Preparation(container, *placed, fmt, self.edges, band)
                    self.preparations[container.name] = preparation

    def partial_maxima(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of the maxima of all edge blocks: float32 ``[edges.size]``, whatever
        torch's default dtype is (RS-1).

        Reads only what lies in such blocks. NaN and infinity pass through, so that every rank
        with a part of the block refuses it.

        Args:
            tensors: this rank's containers by name; only those that share blocks are looked up.
        """
        found = torch.zeros(self.edges.size, dtype=torch.float32, device="cpu")
        for name, preparation in self.preparations.items():
            if preparation.shares_blocks:
                preparation.add_maxima(tensors[name], found)
        return found


class _ScalePart(msgspec.Struct, frozen=True):
    """Scales that a piece computes and this rank holds."""

    piece: int
    blocks: tuple[Ids, ...]
    """Which of those that the piece touches, per dimension."""
    start: Shape
    """The first in the container of scales."""


class Preparation:
    """The conversion of one rank's container."""

    def __init__(
        self,
        container: Container,
        shape: Shape,
        pieces: list[Piece],
        fmt: Format,
        edges: RankEdges,
        band: int,
    ) -> None:
        """Made by :class:`RankQuantiser`."""
        self.name = container.name
        self.shape = shape
        """Of the local tensor, and of the values it becomes."""
        self.fmt = fmt
        self.scale_shape: Shape | None = None
        """Of the scales that this rank holds; ``None`` if it holds none."""
        self._dtype: torch.dtype = getattr(torch, container.dtype.name)
        self._edges = edges
        self._band = max(min(band, math.prod(shape)), *shape[-1:], 1)
        self._pieces = pieces
        self._blocked: list[Blocked] = []
        self._scale_parts: list[_ScalePart] = []
        if not isinstance(fmt, Cast):
            self._blocked = [Blocked.of(piece, fmt) for piece in pieces]
            scales = source_scales(container, fmt)
            placed = None if scales is None else place(scales.layout, edges.rank)
            if placed is not None and all(placed[0]):
                self.scale_shape = placed[0]
                self._scale_parts = [self._scale_part(part, fmt) for part in placed[1]]

    @property
    def scale_name(self) -> str | None:
        """Of the container of scales; ``None`` if this rank has none."""
        if self.scale_shape is None or isinstance(self.fmt, Cast):
            return None
        return self.name + suffix(self.fmt)

    @property
    def values_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.fmt.element.name)
        return dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """float32 for a cast, which has no scales."""
        name = "float32" if isinstance(self.fmt, Cast) else scale_dtype(self.fmt).name
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        values = math.prod(self.shape) * self.values_dtype.itemsize
        return values + math.prod(self.scale_shape or (0,)) * self.scale_dtype.itemsize

    @property
    def temporary_nbytes(self) -> int:
        """The most bytes that :meth:`prepare` holds at a time beside its outputs."""
        scales = [math.prod(map(len, laid.touched)) for laid in self._blocked]
        # Scratch, a band's reduced rows, the scales of all pieces, one piece's places and copies;
        # numbers.
        reduced = max((laid.reduced(self._band) for laid in self._blocked), default=0)
        known = 4 * sum(scales) + 24 * max(scales, default=0)
        return 4 * self._band + self._dtype.itemsize * reduced + known + 64

    def prepare(
        self,
        local: Tensor,
        values: Tensor,
        scales: Tensor | None = None,
        maxima: Tensor | None = None,
    ) -> None:
        """Converts the container.

        Args:
            local: what this rank holds, of ``shape``, strided in any way.
            values: is written, of ``shape`` and ``values_dtype``.
            scales: is written, of ``scale_shape`` and ``scale_dtype``.
            maxima: of all edge blocks, exchanged; needed if this rank's ``edges`` have any.

        Raises:
            NotFinite: there is NaN or infinity in the container, or on another rank in a block
                that it shares.
            QuantError: a tensor isn't as described here.
        """
        self._check(local, "local", self.shape, self._dtype)
        self._check(values, "values", self.shape, self.values_dtype)
        if self.scale_shape is not None:
            self._check(scales, "scales", self.scale_shape, self.scale_dtype)
        scratch = torch.empty(self._band, dtype=torch.float32, device=local.device)
        if isinstance(self.fmt, Cast):
            self._cast(local, values, scratch)
            return
        found = [self._convert(laid, local, values, maxima, scratch) for laid in self._blocked]
        for part in self._scale_parts:
            assert scales is not None, "checked above"
            held = found[part.piece]
            for dim, blocks in enumerate(part.blocks):
                held = held.index_select(dim, torch.from_numpy(blocks).to(held.device))
            scales[box(part.start, held.shape)] = arithmetic.stored(held, self.fmt)

    @property
    def shares_blocks(self) -> bool:
        """Whether other ranks hold a part of any block."""
        return any(laid.name in self._edges.tensors for laid in self._blocked)

    def add_maxima(self, local: Tensor, found: Tensor) -> None:
        """Adds this container's part to the vector of :meth:`RankQuantiser.partial_maxima`."""
        laid_out = [laid for laid in self._blocked if laid.name in self._edges.tensors]
        if not laid_out:
            return
        self._check(local, "local", self.shape, self._dtype)
        scratch = torch.empty(self._band, dtype=torch.float32, device=local.device)
        for laid in laid_out:
            offset, wanted = self._edges.tensors[laid.name]
            for lead, (x,) in laid.matrices(local):
                for rows, columns in laid.zones():
                    ids = laid.ids(lead, rows, columns)
                    here = np.flatnonzero(np.isin(ids, wanted))
                    if not len(here):
                        continue
                    part = x[within(rows), within(columns)]
                    amax = bands.maxima(part, (rows.size, columns.size), scratch)
                    amax = amax.ravel()[torch.from_numpy(here)].cpu()
                    at = torch.from_numpy(offset + np.searchsorted(wanted, ids[here]))
                    found[at] = torch.maximum(found[at], amax)

    def _convert(
        self, laid: Blocked, local: Tensor, values: Tensor, maxima: Tensor | None, scratch: Tensor
    ) -> Tensor:
        """Converts a piece; returns the scales of all blocks that it touches, float32."""
        assert not isinstance(self.fmt, Cast), "casts have no scales"
        scale = self._known_scales(laid, maxima).to(local.device)
        for lead, (x, out) in laid.matrices(local, values):
            for rows, columns in laid.zones():
                part = within(rows), within(columns)
                blocks = tuple(slice(z.row, z.row + z.count) for z in (rows, columns))
                bands.convert(
                    x[part],
                    out[part],
                    scale[lead][blocks],
                    (rows.size, columns.size),
                    self.fmt,
                    scratch,
                    measure=rows.whole and columns.whole,
                )
        if not scale.isfinite().all():
            raise arithmetic.not_finite(laid.name, self.fmt, rank=self._edges.rank)
        return scale

    def _known_scales(self, laid: Blocked, maxima: Tensor | None) -> Tensor:
        """Scales of edge blocks, from what was exchanged; the others are still to be found."""
        assert not isinstance(self.fmt, Cast), "casts have no scales"
        shape = [len(blocks) for blocks in laid.touched]
        known = torch.empty(shape, dtype=torch.float32, device="cpu")
        if laid.name not in self._edges.tensors:
            return known
        if maxima is None or maxima.shape != (self._edges.size,):
            raise QuantError(
                f"container `{self.name}` on rank {self._edges.rank} shares blocks of {laid.name} "
                f"with others; pass the {self._edges.size} exchanged maxima",
                container=self.name,
                tensor=laid.name,
                rank=self._edges.rank,
            )
        offset, blocks = self._edges.tensors[laid.name]
        ids = grid_ids(laid.grid, laid.touched)
        here = np.flatnonzero(np.isin(ids, blocks))
        at = torch.from_numpy(offset + np.searchsorted(blocks, ids[here]))
        known.view(-1)[torch.from_numpy(here)] = arithmetic.scales(maxima[at], self.fmt)
        return known

    def _cast(self, local: Tensor, values: Tensor, scratch: Tensor) -> None:
        for piece in self._pieces:
            x, out = local[box(piece.start, piece.shape)], values[box(piece.start, piece.shape)]
            while x.dim() < 2:
                x, out = x.unsqueeze(0), out.unsqueeze(0)
            for lead in np.ndindex(*x.shape[:-2]):
                if not bands.cast(x[lead], out[lead], scratch):
                    name = piece.leaf.tensor.name
                    raise arithmetic.not_finite(name, self.fmt, rank=self._edges.rank)

    def _scale_part(self, part: Piece, fmt: Scaled) -> _ScalePart:
        """The piece that computes the scales of a part of the scale layout."""
        wanted = [
            np.concatenate([np.arange(start, start + n) for start, n in spans])
            for spans in part.spans
        ]
        for index, laid in enumerate(self._blocked):
            if scale_tensor(laid.piece.leaf.tensor, fmt) != part.leaf.tensor:
                continue
            own = [np.asarray(axis.touched)[list(axis.owned)] for axis in laid.axes]
            if all(np.isin(w, o).all() for w, o in zip(wanted, own, strict=True)):
                at = (np.searchsorted(t, w) for t, w in zip(laid.touched, wanted, strict=True))
                return _ScalePart(index, tuple(at), part.start)
        raise AssertionError(f"{part.leaf.tensor.name} lies with the first elements of its blocks")

    def _check(self, tensor: Tensor | None, what: str, shape: Shape, dtype: torch.dtype) -> None:
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = "missing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise QuantError(
                f"container `{self.name}` on rank {self._edges.rank}: {what} should be {shape} of "
                f"{dtype}, not {found}; pass what the side describes",
                container=self.name,
                rank=self._edges.rank,
            )
