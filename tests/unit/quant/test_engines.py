"""Quantised trainers fill quantised engines: what arrives is the quantised model, cut by torch."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fabric_ray.models import Moe, parameter_shapes
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.plan import (
    Concat,
    Container,
    DType,
    Leaf,
    Mesh,
    Replicate,
    Shard,
    Side,
    Tensor,
    apply,
    plan,
)
from fabric_ray.weights.families import target_side
from fabric_ray.weights.quant import (
    Cast,
    Format,
    Fp8,
    Int8,
    UnalignedBlocks,
    UnsupportedFormat,
    linear_formats,
    quantise,
    quantised_source,
    quantised_target,
)
from fabric_ray.weights.quant.formats import block_of, format_of, suffix
from fabric_ray.weights.reference import expected_containers
from tests.examples import by_turns, examples
from tests.unit.families.pushes import chunked, fully_sharded
from tests.unit.models.small_models import small
from tests.unit.plan.test_against_torch import layouts
from tests.unit.quant.local import held, plain_bytes, prepared

BF16 = DType.of("bfloat16")
DENSE = small("qwen3", dtype="bfloat16", intermediate=64, qk_norm=True, layers=2)
FUSED = small(
    "glm4",
    dtype="bfloat16",
    intermediate=64,
    qkv_bias=True,
    fused_mlp=True,
    post_norms=True,
    layers=2,
)
SPARSE = small(
    "qwen2_moe",
    dtype="bfloat16",
    intermediate=64,
    qkv_bias=True,
    layers=2,
    moe=Moe(experts=5, top_k=2, intermediate=32, shared_intermediate=64, dense_layers=(1,)),
)


def random_model(config):
    generator = torch.Generator().manual_seed(7)
    shapes = parameter_shapes(config).items()
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes}


def trained(full, formats, *, world, replicas=1):
    """The side and memory of FSDP trainers that have converted their shards."""
    side, memory = chunked(full, world, replicas=replicas)
    plain = held(side, full)
    assert plain.keys() == memory.keys()
    return quantised_source(side, formats), prepared(side, formats, plain)


def pushed(source, memory, target):
    """What a planned push leaves in every target container, as bytes."""
    routes = plan(source, target, min_split_bytes=1)
    room = {
        (rank, local.name): torch.zeros(local.shape, dtype=getattr(torch, local.dtype))
        for rank in target.ranks
        for local in routes.local_containers("target", rank)
    }
    raw = {key: plain_bytes(tensor).numpy() for key, tensor in room.items()}
    apply(routes, {key: t.contiguous().numpy() for key, t in memory.items()}, raw)
    return {key: plain_bytes(tensor) for key, tensor in room.items()}


def expanded(scale, block, shape):
    """Each element's scale, so that torch can cut scales as it cuts values."""
    for dim, size in enumerate(block):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


def expected(config, full, formats, fmt, target, *, tp, ep, rank):
    """An engine rank's containers: the whole model is quantised first and cut then."""
    values, scales = {}, {}
    for name, tensor in full.items():
        leaf = Leaf(Tensor(name, tuple(tensor.shape), BF16), Mesh.line([0]), (Replicate(),))
        if format_of(Container(name, BF16, leaf), formats) is None:
            values[name] = scales[name] = plain_bytes(tensor)
            continue
        q, scale = quantise(tensor, fmt)
        block = block_of(fmt, tuple(tensor.shape))
        values[name] = plain_bytes(q)
        scales[name] = expanded(plain_bytes(scale), block, tensor.shape)
    found = expected_containers(config, values, tp=tp, ep=ep, rank=rank)
    cut = expected_containers(config, scales, tp=tp, ep=ep, rank=rank)
    for container in target.containers:
        name = container.name.removesuffix(suffix(fmt))
        if name != container.name:
            rows, columns = fmt.per if isinstance(fmt.per, tuple) else (1, cut[name].shape[-1])
            found[container.name] = cut[name][..., ::rows, ::columns]
    return found


@pytest.mark.parametrize(
    ("config", "fmt", "ranks"),
    by_turns(
        [DENSE, FUSED, SPARSE],
        [Fp8((8, 8)), Fp8((8, 4), "ue8m0_byte"), Fp8("channel"), Int8()],
        [(3, 1), (5, 2)],
    ),
    ids=str,
)
def test_an_engine_gets_the_quantised_model(config, fmt, ranks) -> None:
    world, replicas = ranks
    full = random_model(config)
    formats = linear_formats(config.kind, fmt)
    source, memory = trained(full, formats, world=world, replicas=replicas)
    for tp, ep in [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]:
        if ep > 1 and not config.moe:
            continue
        plain = target_side(config, tp=tp, ep=ep)
        target = quantised_target(plain, formats)
        found = pushed(source, memory, target)
        for rank in range(tp):
            wanted = expected(config, full, formats, fmt, target, tp=tp, ep=ep, rank=rank)
            assert wanted.keys() == {name for r, name in found if r == rank}
            for name, tensor in wanted.items():
                assert torch.equal(found[rank, name], plain_bytes(tensor).contiguous()), name


def test_what_fsdp_sharded_becomes_the_quantised_model() -> None:
    fmt = Fp8((8, 8), "ue8m0")
    formats = linear_formats(SPARSE.kind, fmt)
    weights = InitialWeights(SPARSE, seed=5)
    full = {name: weights[name] for name in weights}
    side, memory = fully_sharded(SPARSE, weights, 3, replicas=2)
    plain = held(side, full)
    shards = {
        key: torch.from_numpy(memory[key]).view(torch.bfloat16).view(tensor.shape)
        for key, tensor in plain.items()
    }
    target = quantised_target(target_side(SPARSE, tp=4, ep=2), formats)
    source = quantised_source(side, formats)
    found = pushed(source, prepared(side, formats, shards), target)
    for rank in range(4):
        wanted = expected(SPARSE, full, formats, fmt, target, tp=4, ep=2, rank=rank)
        for name, tensor in wanted.items():
            assert torch.equal(found[rank, name], plain_bytes(tensor)), name


def test_one_scale_per_matrix_is_one_per_fused_part_and_expert() -> None:
    fmt = Fp8("tensor")
    full, formats = random_model(SPARSE), linear_formats(SPARSE.kind, fmt)
    source, memory = trained(full, formats, world=3)
    found = pushed(source, memory, quantised_target(target_side(SPARSE, tp=2), formats))

    def scale(name):
        return quantise(full[name], fmt)[1].view(torch.int32)

    for rank in range(2):
        prefix = "model.layers.0.self_attn."
        fused = torch.cat([scale(f"{prefix}{n}_proj.weight") for n in "qkv"])
        assert torch.equal(found[rank, f"{prefix}qkv_proj.weight_scale"], fused)
        prefix = "model.layers.0.mlp.experts."
        stacked = torch.stack(
            [
                torch.cat([scale(f"{prefix}{e}.{n}_proj.weight") for n in ("gate", "up")])
                for e in range(5)
            ]
        )
        assert torch.equal(found[rank, f"{prefix}w13_weight_scale"], stacked)


def test_a_cast_model_is_the_whole_model_cast() -> None:
    full = random_model(DENSE)
    source, memory = trained(full, {"*": Cast("float32")}, world=3)
    found = pushed(
        source, memory, quantised_target(target_side(DENSE, tp=2), {"*": Cast("float32")})
    )
    config = msgspec.structs.replace(DENSE, dtype="float32")
    wide = {name: tensor.float() for name, tensor in full.items()}
    for rank in range(2):
        for name, tensor in expected_containers(config, wide, tp=2, rank=rank).items():
            assert torch.equal(found[rank, name], plain_bytes(tensor)), name


@st.composite
def engines(draw):
    """Any layout of matrices that consist of whole blocks, and the size of the blocks."""
    ranks = list(range(draw(st.integers(1, 6))))
    block = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    shape = tuple(size * draw(st.integers(1, 8)) for size in block)
    leading = draw(st.sampled_from([(), (3,)]))
    tensors = [Tensor(f"t{i}", (*leading, *shape), BF16) for i in range(draw(st.integers(1, 3)))]
    container = Container("c", BF16, draw(layouts(tensors, ranks)))
    return Side.of(ranks, [container]), tensors, block


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engines())
def test_an_engine_rank_has_the_scales_of_its_blocks(engine) -> None:
    side, tensors, block = engine
    fmt = Fp8(block)
    try:
        target = quantised_target(side, {"*": fmt})
    except UnalignedBlocks:
        reject()
    full = {t.name: torch.randn(t.shape).bfloat16() for t in tensors}
    scales = {name: quantise(tensor, fmt)[1] for name, tensor in full.items()}
    found = held(target, {f"{name}_scale_inv": scale for name, scale in scales.items()} | full)
    wide = {
        name: expanded(scale, block_of(fmt, tuple(full[name].shape)), full[name].shape)
        for name, scale in scales.items()
    }
    for (rank, name), elements in held(side, wide).items():
        cut = elements[..., :: block[0], :: block[1]]
        assert torch.equal(found[rank, f"{name}_scale_inv"], cut)


@pytest.mark.parametrize(
    ("changes", "tp", "named"),
    [
        (
            {"intermediate": 48},
            4,
            "gate_up_proj.weight.*: a rank would hold 0 to 12 of dimension 0",
        ),
        ({"head_dim": 4}, 4, "qkv_proj.weight.*: a rank would hold 0 to 4 of dimension 0"),
        ({"intermediate": 20}, 1, "gate_proj.weight has 20 along dimension 0"),
    ],
)
def test_shares_that_cut_blocks_are_refused_as_engines_do(changes, tp, named) -> None:
    config = msgspec.structs.replace(DENSE, **changes)
    with pytest.raises(UnalignedBlocks, match=named):
        quantised_target(target_side(config, tp=tp), linear_formats("qwen3", Fp8((8, 8))))


def test_what_engines_keep_plain_stays_plain() -> None:
    target = quantised_target(target_side(SPARSE, tp=2), linear_formats("qwen2_moe", Fp8((8, 8))))
    plain = {c.name.split(".")[-2] for c in target.containers if c.dtype == BF16}
    assert plain == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "qkv_proj",  # its bias
        "gate",
        "shared_expert_gate",
        "norm",
        "lm_head",
    }


def test_a_container_has_one_format() -> None:
    side = target_side(DENSE, tp=1)
    with pytest.raises(UnsupportedFormat, match=r"qkv_proj.*2 formats; give .*q_proj.* the same"):
        quantised_target(side, {"*.q_proj.weight": Fp8()})


def test_a_big_model_stays_small_to_plan() -> None:
    """Kimi-K2's expert shards: 448 rows are 3.5 blocks, but every second shard begins with one."""
    mesh = Mesh.line(range(16))
    for shape in ((7168, 2048), (2048, 7168)):
        leaf = Leaf(Tensor("w.weight", shape, BF16), mesh, (Shard(0),))
        side = Side.of(16, [Container("w.weight", BF16, leaf)])
        _, scales = quantised_source(side, {"*": Fp8()}).containers
        assert isinstance(scales.layout, Leaf)
    odd = Leaf(Tensor("w.weight", (7168, 1536), BF16), Mesh.line(range(128)), (Shard(0),))
    side = Side.of(128, [Container("w.weight", BF16, odd)])
    _, scales = quantised_source(side, {"*": Fp8()}).containers
    assert isinstance(scales.layout, Concat)
    assert len(scales.layout.parts) == 7168 // 128


def test_formats_are_data() -> None:
    formats = {"a*": Fp8((64, 64), "ue8m0"), "b": Fp8("tensor"), "c": Int8(), "*": Cast("float16")}
    encoded = msgspec.json.encode(formats)
    assert msgspec.json.decode(encoded, type=dict[str, Format]) == formats
