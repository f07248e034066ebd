"""Quantising shards is quantising the whole tensor, bit for bit, however it is sharded."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ray.plan import (
    Container,
    DType,
    Leaf,
    Mesh,
    Pad,
    Replicate,
    Shard,
    Side,
    Tensor,
    apply,
    plan,
)
from fabric_ray.weights.quant import (
    Cast,
    Edges,
    Fp8,
    Int8,
    NotFinite,
    QuantError,
    RankQuantiser,
    UnsupportedFormat,
    quantise,
    quantised_source,
    quantised_target,
)
from tests.examples import examples
from tests.unit.plan.test_against_torch import layouts
from tests.unit.quant.local import Held, exchanged, held, plain_bytes, prepared

BF16 = DType.of("bfloat16")
WHOLE = Replicate()

FORMATS = st.one_of(
    st.builds(
        Fp8,
        st.one_of(st.sampled_from(["tensor", "channel"]), st.tuples(*[st.integers(1, 9)] * 2)),
        st.sampled_from(["float32", "ue8m0", "ue8m0_byte"]),
    ),
    st.just(Int8()),
    st.just(Cast("float32")),
    st.just(Cast("bfloat16")),
)


@st.composite
def scenarios(draw):
    """A side that holds all of some tensors, and their values."""
    ranks = list(range(draw(st.integers(1, 6))))
    shape = tuple(draw(st.lists(st.integers(1, 23), min_size=2, max_size=3)))
    dtype = DType.of(draw(st.sampled_from(["bfloat16", "float32"])))
    tensors = [Tensor(f"t{i}.weight", shape, dtype) for i in range(draw(st.integers(1, 3)))]
    layout = draw(layouts(tensors, ranks))
    containers = [Container("c.weight", dtype, layout)]
    if draw(st.booleans()):
        # As where ranks' strides differ.
        some = draw(st.integers(1, len(ranks)))
        parts = [p for p in (tuple(ranks[:some]), tuple(ranks[some:])) if p]
        containers = [Container("c.weight", dtype, layout, ranks=part) for part in parts]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    full = {}
    for tensor in tensors:
        exponents = torch.randint(-140, 100, shape, generator=generator).float()
        values = torch.randn(shape, generator=generator) * torch.exp2(exponents)
        values *= torch.rand(shape, generator=generator) < draw(st.sampled_from([0.05, 1.0]))
        full[tensor.name] = values.to(getattr(torch, dtype.name))
    return Side.of(ranks, containers), full


def converted(full, fmt):
    """Whole tensors and their scales, as bits."""
    out = {}
    suffix = "_scale_inv" if isinstance(getattr(fmt, "per", None), tuple) else "_scale"
    for name, tensor in full.items():
        values, scale = quantise(tensor, fmt, name=name)
        out[name] = plain_bytes(values)
        if scale is not None:
            out[name + suffix] = plain_bytes(scale)
    return out


def assert_same(found: Held, expected: Held) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), FORMATS, st.sampled_from([3, 40, 1 << 18]), st.booleans())
def test_shards_become_shards_of_the_quantised_tensor(scenario, fmt, band, transposed) -> None:
    side, full = scenario
    plain = held(side, full)
    if transposed:
        plain = {key: tensor.mT.contiguous().mT for key, tensor in plain.items()}
    quantised = quantised_source(side, {"*": fmt})
    expected = held(quantised, converted(full, fmt))
    assert_same(prepared(side, {"*": fmt}, plain, band=band), expected)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), FORMATS)
def test_every_value_and_every_scale_has_a_holder(scenario, fmt) -> None:
    side, full = scenario
    dtype = side.containers[0].dtype
    one = Mesh.line([0])
    whole = [
        Container(name, dtype, Leaf(Tensor(name, tuple(t.shape), dtype), one, (WHOLE,)))
        for name, t in full.items()
    ]
    source = quantised_source(side, {"*": fmt})
    routes = plan(source, quantised_target(Side.of(1, whole), {"*": fmt}))
    expected = {(0, name): tensor for name, tensor in converted(full, fmt).items()}
    room = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    memory = prepared(side, {"*": fmt}, held(side, full))
    apply(
        routes,
        {key: tensor.contiguous().numpy() for key, tensor in memory.items()},
        {key: tensor.numpy() for key, tensor in room.items()},
    )
    assert_same(room, expected)


def rows_over(ways: int, shape: tuple[int, int]) -> Side:
    leaf = Leaf(Tensor("w.weight", shape, BF16), Mesh.line(range(ways)), (Shard(0),))
    return Side.of(ways, [Container("w.weight", BF16, leaf)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_shared_block_with_nan_is_refused_by_all_who_share_it(bad) -> None:
    """Rows 0 to 9 on three ranks; rank 1 has the bad value in the block that 0 and 1 share."""
    side, formats = rows_over(3, (30, 8)), {"*": Fp8((4, 4))}
    full = torch.ones(30, 8, dtype=torch.bfloat16)
    full[10, 5] = bad
    plain = held(side, {"w.weight": full})
    quantisers = {rank: RankQuantiser(side, formats, rank) for rank in side.ranks}
    maxima = exchanged(quantisers, plain)
    for rank, quantiser in quantisers.items():
        one = quantiser.preparations["w.weight"]
        values = torch.empty(one.shape, dtype=one.values_dtype)
        arguments = plain[rank, "w.weight"], values, torch.empty(one.scale_shape), maxima[rank]
        if rank == 2:
            one.prepare(*arguments)
            continue
        with pytest.raises(NotFinite, match=rf"w.weight on rank {rank} holds NaN or inf") as raised:
            one.prepare(*arguments)
        assert (raised.value.tensor, raised.value.rank) == ("w.weight", rank)


def test_tensors_that_the_side_does_not_describe_are_refused_by_name() -> None:
    side, formats = rows_over(3, (30, 8)), {"*": Fp8((4, 4))}
    quantiser = RankQuantiser(side, formats, 1)
    one = quantiser.preparations["w.weight"]
    local = torch.zeros(10, 8, dtype=torch.bfloat16)
    values = torch.empty(one.shape, dtype=one.values_dtype)
    maxima, scales = torch.zeros(quantiser.edges.size), torch.empty(one.scale_shape)
    one.prepare(local, values, scales, maxima)
    for arguments, problem in [
        ((local[1:], values, scales, maxima), r"local should be \(10, 8\)"),
        ((local, values[1:], scales, maxima), r"values should be \(10, 8\)"),
        ((local, values.view(torch.uint8), scales, maxima), r"of torch.float8_e4m3fn, not"),
        ((local, values, None, maxima), r"scales should be \(2, 2\) .* not missing"),
        ((local, values, scales, None), r"pass the 2 exchanged maxima"),
    ]:
        with pytest.raises(QuantError, match=rf"`w.weight` on rank 1.*{problem}"):
            one.prepare(*arguments)


def test_formats_that_mean_nothing_are_refused_by_name() -> None:
    def refused(shape, dtype, fmt, problem, layout=lambda leaf: leaf):
        leaf = Leaf(Tensor("a.weight", shape, DType.of(dtype)), Mesh.line([0]), (WHOLE,))
        side = Side.of(1, [Container("a.weight", DType.of(dtype), layout(leaf))])
        for call in (quantised_source, quantised_target, Edges):
            with pytest.raises(UnsupportedFormat, match=f"`a.weight`.*{problem}"):
                call(side, {"*": fmt})

    refused((4, 4), "int32", Fp8(), "is int32; only float32, bfloat16, float16")
    refused((4,), "bfloat16", Int8(), r"has shape \(4,\), but scales are for matrices")
    refused((4, 4), "bfloat16", Fp8((0, 4)), r"blocks of \(0, 4\)")
    refused((4, 4), "bfloat16", Fp8(), "padded", lambda leaf: Pad(leaf, (8, 4)))


def test_replicas_exchange_among_themselves() -> None:
    mesh = Mesh(tuple(range(6)), (2, 3))
    leaf = Leaf(Tensor("w.weight", (30, 8), BF16), mesh, (WHOLE, Shard(0)))
    edges = Edges(Side.of(6, [Container("w.weight", BF16, leaf)]), {"*": Fp8((4, 4))})
    assert [edges.of_rank(rank).partners for rank in range(6)] == [
        (1,), (0,), (), (4,), (3,), ()
    ]  # fmt: skip


def test_sizes_of_all_ranks_are_those_of_each() -> None:
    mesh = Mesh.line(range(4))
    shapes = {"a": (30, 8), "b": (30, 8), "whole": (32, 8), "wide": (6, 20)}
    containers = [
        Container(name, BF16, Leaf(Tensor(name, shape, BF16), mesh, (Shard(0),)))
        for name, shape in shapes.items()
    ]
    edges = Edges(Side.of(4, containers), {"*": Fp8((4, 4))})
    sizes = [edges.of_rank(rank).size for rank in range(4)]
    assert [edges.sizes().get(rank, 0) for rank in range(4)] == sizes
    assert len(set(sizes)) > 1


class Peak(TorchDispatchMode):
    """The most bytes that tensors made by operations take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if is_tensor(a)}
        for made in tree_leaves(out):
            if is_tensor(made) and made.untyped_storage()._cdata not in known:
                nbytes = made.untyped_storage().nbytes()
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(made.untyped_storage(), self._drop, nbytes)
        return out

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize(
    ("fmt", "close"),
    [
        (Fp8(), True),
        (Fp8("tensor"), True),
        (Fp8("channel", "ue8m0_byte"), True),
        (Int8(), True),
        (Cast("float16"), True),
        (Fp8((2, 3), "ue8m0"), False),
        (Fp8((1, 1), "ue8m0_byte"), False),
    ],
)
@pytest.mark.parametrize("band", [1 << 14, 1 << 18])
def test_temporary_memory_is_known_before(fmt, close, band) -> None:
    side = rows_over(3, (3000, 700))
    quantiser = RankQuantiser(side, {"*": fmt}, 0, band=band)
    one = quantiser.preparations["w.weight"]
    local = torch.randn(one.shape).bfloat16()
    maxima = quantiser.partial_maxima({"w.weight": local})
    values = torch.empty(one.shape, dtype=one.values_dtype)
    scales = one.scale_shape and torch.empty(one.scale_shape, dtype=one.scale_dtype)
    with Peak() as memory:
        one.prepare(local, values, scales, maxima)
    assert memory.most <= one.temporary_nbytes
    if close:
        assert one.temporary_nbytes < 1.25 * memory.most
        assert one.temporary_nbytes < 4 * band + 32_000
