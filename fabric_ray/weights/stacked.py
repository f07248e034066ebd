"""Experts that trainers hold as one parameter for each layer, as transformers 5 does.

``experts.gate_up_proj`` is ``[experts, 2 * width, hidden]``, gate over up;
``experts.down_proj`` is ``[experts, hidden, width]``. Engines' sides are made of a tensor for each
expert, so a trainer's stack is described as what it is made of: its memory and its name stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple

import msgspec

from fabric_ray.plan import Concat, Container, Layout, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.plan.report import local_runs
from fabric_ray.plan.types import Stack, leaves


class Rows(NamedTuple):
    """Rows of a tensor, of which a container is made."""

    tensor: Tensor
    run: tuple[int, int]
    """Start and length."""


class _Held(NamedTuple):
    """Rows of a tensor, and the ranks that hold their columns; runs are (start, length)."""

    box: tuple[int, int]
    by_column: Mapping[tuple[int, int], list[int]]


_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
Runs = Sequence[tuple[int, int]]


def unstacked(source: Side, target: Side) -> Side:
    """The source's side, in which stacks of experts are made of the target's tensors.

    A stack that the target needs under its own name is left alone, and so is one of other shapes
    (transposed, as those of gpt-oss): it is refused like any tensor that isn't needed. Where one of
    a layer's stacks is square, the other tells.
    """
    if not any(_stack(container) for container in source.containers):
        return source
    needed = {leaf.tensor.name: leaf.tensor for c in target.containers for leaf in leaves(c.layout)}
    return _made_of(source, needed)


def checkpoint_tensors(source: Side) -> dict[str, Tensor]:
    """The tensors of a trainer's checkpoint, by name: with a tensor for each expert, where the
    source has stacks as transformers 5 makes of such a checkpoint."""
    tensors = {
        leaf.tensor.name: leaf.tensor for c in source.containers for leaf in leaves(c.layout)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, stack = name.rpartition(".")
        if stack not in _PARTS or not _are_rows(tensors, prefix):
            found[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        shape = (rows // len(_PARTS[stack]), columns)
        for expert, part in product(range(experts), _PARTS[stack]):
            own = f"{prefix}.{expert}.{part}.weight"
            found[own] = Tensor(own, shape, tensor.dtype)
    return found


def as_experts(side: Side) -> Side:
    """A module's side in which stacks of experts, as transformers 5 makes of checkpoints, are made
    of a tensor for each expert."""
    return _made_of(side, checkpoint_tensors(side))


def _made_of(side: Side, tensors: Mapping[str, Tensor]) -> Side:
    """The side, in which stacks that aren't among these tensors are made of them."""
    containers = tuple(
        msgspec.structs.replace(container, layout=made_of(container, parts))
        if container.name not in tensors and (parts := _parts(container, tensors))
        else container
        for container in side.containers
    )
    return msgspec.structs.replace(side, containers=containers)


def _are_rows(tensors: Mapping[str, Tensor], experts: str) -> bool:
    """Whether the stacks of a layer are of rows by output, unlike those of gpt-oss."""
    stacks = [tensors.get(f"{experts}.{stack}") for stack in _PARTS]
    up, down = (stack.shape if stack and len(stack.shape) == 3 else None for stack in stacks)
    if not experts.endswith("experts") or up is None or down is None:
        return False
    return up[1] == 2 * down[2] and up[2] == down[1]


def _stack(container: Container) -> bool:
    prefix, _, name = container.name.rpartition(".")
    layout = container.layout
    named = name in _PARTS and prefix.rpartition(".")[2] == "experts"
    return named and isinstance(layout, Leaf) and len(layout.tensor.shape) == 3


def _parts(container: Container, needed: Mapping[str, Tensor]) -> list[tuple[Rows, ...]]:
    """By expert, the tensors of which it lies behind each other; none if they don't fit."""
    if not _stack(container):
        return []
    assert isinstance(container.layout, Leaf)
    tensor = container.layout.tensor
    prefix, _, stack = container.name.rpartition(".")
    experts, rows, columns = tensor.shape
    found = []
    for expert in range(experts):
        names = [f"{prefix}.{expert}.{part}.weight" for part in _PARTS[stack]]
        shape = (rows // len(names), columns)
        parts = tuple(needed[name] for name in names if name in needed)
        if len(parts) < len(names) or any(part.shape != shape for part in parts):
            return []
        # The trainers' dtype, which formats may change.
        whole = (0, shape[0])
        found.append(tuple(Rows(Tensor(p.name, shape, tensor.dtype), whole) for p in parts))
    return found


def made_of(container: Container, slabs: Sequence[Sequence[Rows]]) -> Layout:
    """The layout of a trainer's tensor by the tensors of which it is made.

    Args:
        container: of one tensor of two or three dimensions.
        slabs: for each index of the first of three dimensions (once for a matrix), rows of other
            tensors that lie behind each other.
    """
    leaf = container.layout
    assert isinstance(leaf, Leaf)
    holders: dict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = defaultdict(list)
    for position, rank in enumerate(leaf.mesh.ranks):
        runs = local_runs(leaf.tensor.shape, leaf.mesh.shape, leaf.placements, position)
        holders[tuple(tuple(each) for each in runs)].append(rank)
    if len(leaf.tensor.shape) == 2:
        return _slab(slabs[0], list(holders.items()))
    return Stack(
        tuple(
            _slab(parts, [(runs[1:], r) for runs, r in holders.items() if _has(runs[0], index)])
            for index, parts in enumerate(slabs)
        )
    )


def _has(runs: Runs, index: int) -> bool:
    return any(start <= index < start + length for start, length in runs)


def _slab(parts: Sequence[Rows], holders: Sequence[tuple[Sequence[Runs], Sequence[int]]]) -> Layout:
    """A matrix's rows, of all parts behind each other, on the ranks that have any."""
    boxes: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
    for (rows, columns), ranks in holders:
        for row in rows:
            for column in columns:
                boxes.setdefault(row, {}).setdefault(column, []).extend(ranks)
    found = [
        (piece.tensor, _Held(piece.run, by_column))
        for row, by_column in sorted(boxes.items())
        for piece in _within(parts, row)
    ]
    pieces: list[Layout] = []
    for tensor, group in groupby(found, itemgetter(0)):
        parted = [held for _, held in group]
        pieces += _even(tensor, parted) or [_across(tensor, each) for each in parted]
    return pieces[0] if len(pieces) == 1 else Concat(0, tuple(pieces))


def _even(tensor: Tensor, rows: Sequence[_Held]) -> list[Layout]:
    """One leaf where equally many ranks hold equal shares of whole rows: there may be hundreds."""
    whole, size = (0, tensor.shape[1]), rows[0].box[1]
    ranks = [each.by_column.get(whole, []) for each in rows]
    in_order = all(each.box == (n * size, size) for n, each in enumerate(rows))
    holders = {len(some) for some in ranks}
    split = any(len(each.by_column) > 1 for each in rows)
    if len(rows) * size != tensor.shape[0] or not in_order or split or len(holders) > 1:
        return []
    if not (count := holders.pop()):
        return []
    mesh = Mesh(tuple(rank for some in ranks for rank in some), (len(rows), count))
    return [Leaf(tensor, mesh, (Shard(0), Replicate()))]


def _across(tensor: Tensor, rows: _Held) -> Layout:
    across = [_leaf(tensor, (rows.box, column), r) for column, r in sorted(rows.by_column.items())]
    return across[0] if len(across) == 1 else Concat(1, tuple(across))


def _within(parts: Sequence[Rows], run: tuple[int, int]) -> Iterator[Rows]:
    """The rows that lie in a run of the rows of all parts."""
    begin, end = run[0], sum(run)
    at = 0
    for tensor, (first, length) in parts:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            yield Rows(tensor, (first + low - at, high - low))
        at += length


def _leaf(tensor: Tensor, box: tuple[tuple[int, int], ...], ranks: Sequence[int]) -> Leaf:
    whole = tuple((0, size) for size in tensor.shape)
    return Leaf(tensor, Mesh.line(ranks), (Replicate(),), None if box == whole else box)
