"""A planned push is bit for bit what torch's own sharding gives, for random layouts."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_ray.plan import (
    Concat,
    Container,
    DType,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Placement,
    Plan,
    Replicate,
    Shard,
    Side,
    Stack,
    StridedShard,
    Tensor,
    apply,
    plan,
)
from tests.examples import examples

from .torch_model import buffers, evaluate

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8]


@st.composite
def meshes(draw, ranks: list[int]) -> Mesh:
    order = draw(st.permutations(ranks))
    size = draw(st.integers(1, len(order)))
    outer, middle = draw(divisors(size)), draw(divisors(size))
    shapes = [(size,), (outer, size // outer)]
    if size % (outer * middle) == 0:
        shapes.append((outer, middle, size // outer // middle))
    return Mesh(tuple(order[:size]), draw(st.sampled_from(shapes)))


def divisors(of: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, of + 1) if of % n == 0])


@st.composite
def placements(draw, mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    dims = st.integers(0, ndim - 1)
    one = st.one_of(
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, st.integers(1, 5)),
        st.just(Replicate()),
    )
    return tuple(draw(one) for _ in mesh.shape)


@st.composite
def families(draw, index: int) -> tuple[list[Tensor], torch.dtype]:
    """Tensors of one shape, which can be fused and stacked."""
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    name = DType.of(str(dtype).removeprefix("torch."))
    count = draw(st.integers(1, 3))
    return [Tensor(f"t{index}.{i}", shape, name) for i in range(count)], dtype


@st.composite
def layouts(draw, tensors: list[Tensor], ranks: list[int]) -> Layout:
    mesh = draw(meshes(ranks))
    placed = draw(placements(mesh, len(tensors[0].shape)))
    leaves = tuple(Leaf(tensor, mesh, placed) for tensor in tensors)
    kind = draw(st.sampled_from(["concat", "stack", "owned", "experts", "sliced"]))
    if kind == "concat":
        return Concat(draw(st.integers(0, len(tensors[0].shape) - 1)), leaves)
    if kind == "stack":
        return Stack(leaves)
    if kind == "owned":
        owners = [draw(meshes(ranks)) for _ in tensors]
        leaves = tuple(
            Leaf(tensor, own, (Replicate(),) * len(own.shape))
            for tensor, own in zip(tensors, owners, strict=True)
        )
        return Stack(leaves)
    if kind == "experts":
        axis = draw(st.integers(0, len(tensors[0].shape) - 1))
        return Stack(tuple(Concat(axis, (leaf, leaf)) for leaf in leaves))
    cut = draw(st.integers(0, tensors[0].shape[0] - 1))
    boxes = [(cut, tensors[0].shape[0] - cut), (0, cut)]
    return Concat(
        0,
        tuple(
            Leaf(t, mesh, placed, (box, *((0, n) for n in t.shape[1:])))
            for box in boxes
            if box[1]
            for t in tensors
        ),
    )


@st.composite
def sides(draw, groups: list[list[Tensor]], ranks: list[int], full) -> Side:
    containers = []
    for index, tensors in enumerate(groups):
        layout = draw(layouts(tensors, ranks))
        shapes = [found[0].shape for r in ranks if (found := evaluate(layout, r, full))]
        room = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        if draw(st.booleans()):
            room = tuple(n + draw(st.integers(0, 2)) for n in room)
            layout = Pad(layout, room)
        strides = None
        if draw(st.booleans()):
            steps, step = [0] * len(room), tensors[0].dtype.itemsize
            for dim in draw(st.permutations(range(len(room)))):
                steps[dim] = step
                step = step * max(room[dim], 1) + draw(st.sampled_from([0, 0, 6]))
            strides = tuple(steps)
        containers.append(Container(f"c{index}", tensors[0].dtype, layout, strides))
        if draw(st.booleans()):
            mesh = draw(meshes(ranks))
            again = Leaf(tensors[0], mesh, draw(placements(mesh, len(tensors[0].shape))))
            containers.append(Container(f"c{index}.again", tensors[0].dtype, again))
    return Side.of(ranks, containers)


@st.composite
def scenarios(draw) -> tuple[Side, Side, dict[str, torch.Tensor]]:
    groups, full = [], {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    for index in range(draw(st.integers(1, 3))):
        tensors, dtype = draw(families(index))
        groups.append(tensors)
        for tensor in tensors:
            size = (*tensor.shape, tensor.dtype.itemsize)
            raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            full[tensor.name] = raw.view(dtype).reshape(tensor.shape)
    source = draw(sides(groups, [2 * r + 1 for r in range(draw(st.integers(1, 6)))], full))
    target = draw(sides(groups, list(range(draw(st.integers(1, 5)))), full))
    return source, target, full


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.sampled_from([1, 64, 1 << 18]))
def test_every_target_byte_is_what_torch_puts_there_and_padding_is_untouched(scenario, split):
    source, target, full = scenario
    planned = plan(source, target, min_split_bytes=split)
    got = buffers(target, full, filled=False)
    moved = apply(planned, buffers(source, full, filled=True), got)
    expected = buffers(target, full, filled=True)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=str(key))
    held = [evaluate(c.layout, r, full) for c in target.containers for r in target.ranks]
    assert moved == sum(int(f[1].sum()) * f[0].element_size() for f in held if f)
    assert moved == planned.balance().nbytes


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_planning_again_gives_the_same_bytes(scenario):
    source, target, _ = scenario
    planned = plan(source, target)
    data = planned.to_bytes()
    assert plan(source, target).to_bytes() == data
    assert Plan.from_bytes(data) == planned
    assert Plan.from_bytes(data).digest() == planned.digest()


def test_large_shards_arrive_whole():
    """Sizes at which runs, loops and splits are those of real models."""
    full = {
        name: torch.randn(rows, 256).to(torch.bfloat16)
        for name, rows in (("gate", 1537), ("up", 1537), ("down", 1024))
    }
    bf16 = DType.of("bfloat16")
    tensors = {name: Tensor(name, tuple(t.shape), bf16) for name, t in full.items()}
    order = list(range(8))
    random.Random(5).shuffle(order)
    trainers = Mesh(tuple(order), (4, 2), ("dp", "tp"))
    placed = (StridedShard(0, 2), Shard(0))
    source = Side.of(8, [Container(n, bf16, Leaf(t, trainers, placed)) for n, t in tensors.items()])
    engines = Mesh((0, 1, 2), (3,))
    parts = tuple(Leaf(tensors[n], engines, (Shard(0),)) for n in ("gate", "up"))
    target = Side.of(
        3,
        [
            Container("gate_up", bf16, Concat(0, parts)),
            Container("down", bf16, Leaf(tensors["down"], engines, (Shard(1),))),
        ],
    )
    planned = plan(source, target)
    got = buffers(target, full, filled=False)
    apply(planned, buffers(source, full, filled=True), got)
    for key, value in buffers(target, full, filled=True).items():
        np.testing.assert_array_equal(got[key], value)
