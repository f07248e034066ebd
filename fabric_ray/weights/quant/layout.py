"""Quantised sides: the layouts of values and scales, from the layout of what is quantised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from fabric_ray.plan.types import (
    Concat,
    Container,
    DType,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Placement,
    Replicate,
    Shard,
    Side,
    Stack,
    StridedShard,
    Tensor,
    leaves,
)
from fabric_ray.weights.quant.blocks import owned
from fabric_ray.weights.quant.errors import UnalignedBlocks
from fabric_ray.weights.quant.formats import (
    Cast,
    Formats,
    Scaled,
    Shape,
    block_of,
    format_of,
    scale_dtype,
    scale_tensor,
    suffix,
)
from fabric_ray.weights.quant.spans import Cuts, Spans, box_of, cut_spans, cuts_of, leaf_spans

_ScaleContainer = Callable[[Container, Scaled], Container | None]


def quantised_source(side: Side, formats: Formats) -> Side:
    """What trainers hold once each has quantised its shards.

    Containers keep names and layouts and lose their strides: values are written densely. Behind
    each that has scales comes a container ``NAME_scale_inv`` or ``NAME_scale`` of one scale per
    block. A scale lies where its block's first element lies, so every one has a holder. That is
    the layout of the values itself where shards begin with blocks; elsewhere each distinct shard
    is named.

    Raises:
        UnsupportedFormat: a format means nothing for a tensor, or a container has several.
    """
    return _quantised(side, formats, source_scales)


def quantised_target(side: Side, formats: Formats) -> Side:
    """What engine ranks hold of a quantised model, from what they hold of a plain one.

    Scales are cut, fused and stacked like their values. Along dimensions of which a scale covers
    all, each rank has it.

    Raises:
        UnalignedBlocks: a rank's share of a part, or a fused part before the last, isn't made of
            whole blocks; vLLM and SGLang refuse that as well.
        UnsupportedFormat: as :func:`quantised_source`.
    """
    return _quantised(side, formats, _engine_scales)


def scaled_tensors(side: Side, formats: Formats) -> Iterator[tuple[str, str]]:
    """Names of tensors that are given scales, and those of their scales."""
    for container in side.containers:
        fmt = format_of(container, formats)
        if fmt is not None and not isinstance(fmt, Cast) and fmt.element != container.dtype:
            for leaf in leaves(container.layout):
                yield leaf.tensor.name, scale_tensor(leaf.tensor, fmt).name


def source_scales(container: Container, fmt: Scaled) -> Container | None:
    """The container of the scales that trainers hold beside a container of values."""
    return _scales(
        container, fmt, _mapped(container.layout, lambda x: _scales_at_first_elements(x, fmt))
    )


def _engine_scales(container: Container, fmt: Scaled) -> Container | None:
    _check_fused(container, container.layout, fmt)
    return _scales(
        container, fmt, _mapped(container.layout, lambda x: _scales_of_an_engine(container, x, fmt))
    )


def _scales(container: Container, fmt: Scaled, layout: Layout | None) -> Container | None:
    if layout is None:
        return None
    name = container.name + suffix(fmt)
    return Container(name, scale_dtype(fmt), layout, None, container.ranks)


def _quantised(side: Side, formats: Formats, scale_container: _ScaleContainer) -> Side:
    containers: list[Container] = []
    for container in side.containers:
        fmt = format_of(container, formats)
        if fmt is None or fmt.element == container.dtype:
            containers.append(container)
            continue
        element = fmt.element
        values = _mapped(container.layout, partial(_retyped, dtype=element))
        assert values is not None, "every leaf has values"
        containers.append(Container(container.name, element, values, None, container.ranks))
        scales = None if isinstance(fmt, Cast) else scale_container(container, fmt)
        if scales is not None:
            containers.append(scales)
    return Side(side.ranks, tuple(containers))


def _mapped(layout: Layout, to: Callable[[Leaf], Layout | None]) -> Layout | None:
    """The same expression over other leaves; what has none left vanishes."""
    if isinstance(layout, Leaf):
        return to(layout)
    if isinstance(layout, Pad):
        part = _mapped(layout.part, to)
        return None if part is None else Pad(part, layout.shape)
    parts = tuple(p for part in layout.parts if (p := _mapped(part, to)) is not None)
    if not parts:
        return None
    return Concat(layout.axis, parts) if isinstance(layout, Concat) else Stack(parts)


def _retyped(leaf: Leaf, dtype: DType) -> Leaf:
    tensor = Tensor(leaf.tensor.name, leaf.tensor.shape, dtype)
    return Leaf(tensor, leaf.mesh, leaf.placements, leaf.slice)


def _scales_at_first_elements(leaf: Leaf, fmt: Scaled) -> Layout | None:
    form = _form(leaf.tensor.shape, leaf.mesh, leaf.placements, leaf.slice, fmt)
    tensor = scale_tensor(leaf.tensor, fmt)
    return form and _mapped(form, lambda x: Leaf(tensor, x.mesh, x.placements, x.slice))


# Layers and experts repeat each other.
@lru_cache(maxsize=1 << 12)
def _form(
    shape: Shape, mesh: Mesh, placements: tuple[Placement, ...], box: Spans | None, fmt: Scaled
) -> Layout | None:
    """The layout of scales of any tensor that is placed like this."""
    leaf = Leaf(Tensor("", shape, fmt.element), mesh, placements, box)
    block = block_of(fmt, shape)
    grid = [owned((span,), b) for span, b in zip(box_of(leaf), block, strict=True)]
    if not all(grid):
        return None  # none of its blocks begins here
    tensor = scale_tensor(leaf.tensor, fmt)
    splits: dict[int, int] = {}
    for dim, (span, size) in enumerate(zip(box_of(leaf), block, strict=True)):
        cuts, mesh_dims = cuts_of(leaf, dim)
        split = _same_cut(span, size, cuts)
        if split is None:
            return _by_shard(leaf, tensor, block)
        splits.update(zip(mesh_dims, split, strict=True))
    return _on_blocks(leaf, tensor, tuple(g[0] for g in grid), splits)


def _on_blocks(leaf: Leaf, tensor: Tensor, grid: Spans, splits: dict[int, int]) -> Leaf:
    """The leaf's own placements over its scales; ``splits`` cut mesh dimensions in two."""
    shape: list[int] = []
    placements: list[Placement] = []
    for mesh_dim, (placement, ways) in enumerate(
        zip(leaf.placements, leaf.mesh.shape, strict=True)
    ):
        inner = splits.get(mesh_dim, 1)
        sizes = (ways,) if inner == 1 else (ways // inner, inner)
        shape.extend(sizes)
        placements.extend(placement for _ in sizes)
    names = leaf.mesh.names if len(shape) == len(leaf.mesh.shape) else ()
    box = None if leaf.slice is None else grid
    return Leaf(tensor, Mesh(leaf.mesh.ranks, tuple(shape), names), tuple(placements), box)


@lru_cache(maxsize=1 << 12)
def _same_cut(box: tuple[int, int], size: int, cuts: Cuts) -> tuple[int, ...] | None:
    """How to cut the blocks that begin in a box so that each lies with its first element.

    The answer is what to split each mesh dimension by: a plain shard of 3.5 blocks, say, is one of
    7 blocks over half of the ranks, cut again in two. ``None``: there is no such cut.
    """
    (blocks,) = owned((box,), size)
    options = [(1,) * len(cuts)]
    if len(cuts) == 1 and isinstance(cuts[0][0], Shard):
        ways = cuts[0][1]
        options += [(n,) for n in range(2, ways) if ways % n == 0]
    for option in options:
        if all(
            owned(cut_spans(box, cuts, coords), size) == cut_spans(blocks, *finer)
            for coords, finer in _coordinates(cuts, option)
        ):
            return option
    return None


def _coordinates(
    cuts: Cuts, splits: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[Cuts, tuple[int, ...]]]]:
    """Each place in a mesh, and the same place once its dimensions have been split."""
    finer_cuts: list[tuple[Placement, int]] = []
    for (placement, ways), inner in zip(cuts, splits, strict=True):
        finer_cuts += [(placement, ways)] if inner == 1 else []
        finer_cuts += [(placement, ways // inner), (placement, inner)] if inner > 1 else []
    for coords in itertools.product(*(range(ways) for _, ways in cuts)):
        finer: list[int] = []
        for coord, inner in zip(coords, splits, strict=True):
            finer += [coord] if inner == 1 else divmod(coord, inner)
        yield coords, (tuple(finer_cuts), tuple(finer))


def _by_shard(leaf: Leaf, tensor: Tensor, block: tuple[int, ...]) -> Layout | None:
    """One leaf for each distinct shard, on all ranks that hold it."""
    holders: dict[tuple[Spans, ...], list[int]] = {}
    for rank in leaf.mesh.ranks:
        spans = leaf_spans(leaf, rank)
        assert spans is not None, "the rank is in the mesh"
        grid = tuple(owned(s, b) for s, b in zip(spans, block, strict=True))
        if all(grid):
            holders.setdefault(grid, []).append(rank)
    parts = tuple(
        _boxes(tensor, Mesh.line(ranks), grid, ()) for grid, ranks in sorted(holders.items())
    )
    return Concat(0, parts) if parts else None


def _boxes(tensor: Tensor, mesh: Mesh, grid: tuple[Spans, ...], box: Spans) -> Layout:
    """A product of intervals, joined along one dimension after the other."""
    dim = len(box)
    if dim == len(grid):
        return Leaf(tensor, mesh, (Replicate(),), box)
    parts = tuple(_boxes(tensor, mesh, grid, (*box, span)) for span in grid[dim])
    return parts[0] if len(parts) == 1 else Concat(dim, parts)


def _scales_of_an_engine(container: Container, leaf: Leaf, fmt: Scaled) -> Layout | None:
    if isinstance(fmt.per, tuple):
        cut = _cut_block(leaf.tensor.shape, leaf.mesh, leaf.placements, leaf.slice, fmt)
        if cut is not None:
            raise _unaligned(container, leaf.tensor, *cut)
        return _scales_at_first_elements(leaf, fmt)
    tensor = scale_tensor(leaf.tensor, fmt)
    single = [n == 1 for n in tensor.shape]
    placements = tuple(
        Replicate() if isinstance(p, (Shard, StridedShard)) and single[p.dim] else p
        for p in leaf.placements
    )
    box = leaf.slice and tuple(
        (0, 1) if one else span for one, span in zip(single, leaf.slice, strict=True)
    )
    return Leaf(tensor, leaf.mesh, placements, box)


@lru_cache(maxsize=1 << 12)
def _cut_block(
    shape: Shape, mesh: Mesh, placements: tuple[Placement, ...], box: Spans | None, fmt: Scaled
) -> tuple[int, int, int, int] | None:
    """A block's size, and dimension, start and end of a rank's interval that cuts one in two."""
    leaf = Leaf(Tensor("", shape, fmt.element), mesh, placements, box)
    for dim, (span, size) in enumerate(zip(box_of(leaf), block_of(fmt, shape), strict=True)):
        cuts, _ = cuts_of(leaf, dim)
        for coords in itertools.product(*(range(ways) for _, ways in cuts)):
            for start, length in cut_spans(span, cuts, coords):
                stop = start + length
                if start % size or (stop % size and stop != shape[dim]):
                    return size, dim, start, stop
    return None


def _unaligned(
    container: Container, tensor: Tensor, size: int, dim: int, start: int, stop: int
) -> UnalignedBlocks:
    return UnalignedBlocks(
        f"container `{container.name}`: a rank would hold {start} to {stop} of dimension {dim} of "
        f"{tensor.name} (size {tensor.shape[dim]}), which isn't made of whole blocks of {size}; "
        "use fewer ranks, smaller blocks, or leave it as it is",
        tensor=tensor.name,
        container=container.name,
    )


def _check_fused(container: Container, layout: Layout, fmt: Scaled) -> None:
    """Only the last part of a fused container may end within a block."""
    if isinstance(layout, (Leaf, Pad)):
        return
    for part in layout.parts:
        _check_fused(container, part, fmt)
    if not isinstance(layout, Concat) or not isinstance(fmt.per, tuple):
        return
    for part in layout.parts[:-1]:
        if not isinstance(part, Leaf):
            continue
        size, whole = block_of(fmt, part.tensor.shape)[layout.axis], part.tensor.shape[layout.axis]
        if whole % size:
            raise UnalignedBlocks(
                f"container `{container.name}`: {part.tensor.name} has {whole} along dimension "
                f"{layout.axis}, not a multiple of the block's {size}, and another part follows "
                "it; use smaller blocks, or leave them as they are",
                tensor=part.tensor.name,
                container=container.name,
            )
