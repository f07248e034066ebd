"""What the tables and the planner leave on an engine is what full tensors, cut by torch, give."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from fabric_ray.models import ModelConfig
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.models.tensor_parallel import full_parameters
from fabric_ray.weights.families import (
    FAMILIES,
    source_side,
    target_containers,
    target_side,
)
from fabric_ray.weights.reference import expected_containers
from tests.examples import by_turns
from tests.unit.families.pushes import assert_same, chunked, fully_sharded, noise, pushed, raw
from tests.unit.models.small_models import (
    FROM_PUBLISHED,
    LAID_OUT,
    LATENT,
    NESTED,
    SMALL,
    waves,
)

# Two key/value heads: at tp=4 each lies on two ranks. Six experts: ep=4 owns 2, 2, 1 and 1.
DENSE = [(1, 1), (2, 1), (4, 1)]
MOE = [*DENSE, (2, 2), (4, 2), (4, 4)]
SPARSE = LAID_OUT["glm_moe_dsa"]
assert SPARSE.latent is not None
SHARED = msgspec.structs.replace(SPARSE.latent, unindexed_layers=(1,))
MODELS = SMALL | LAID_OUT | NESTED | {"glm-5.2": msgspec.structs.replace(SPARSE, latent=SHARED)}
MODELS |= FROM_PUBLISHED
CASES = [
    (name, tp, ep) for name, config in MODELS.items() for tp, ep in (MOE if config.moe else DENSE)
]


def test_every_architecture_with_a_table_has_a_model_here() -> None:
    missing = FAMILIES.keys() - {config.kind for config in MODELS.values()}
    assert not missing, "add a config.json of each to tests/unit/models/published_configs.json"


@pytest.mark.parametrize(("case", "ranks"), by_turns(CASES, [(3, 1), (4, 2)]), ids=str)
def test_sharded_trainers_fill_every_container_bit_for_bit(case, ranks):
    (name, tp, ep), (world, replicas) = case, ranks
    config = msgspec.structs.replace(MODELS[name], dtype="bfloat16")
    full = noise(config)
    source, memory = chunked(full, world, replicas=replicas)
    # Two engines, whose ranks are numbered as they please.
    ranks = tuple(range(3, 3 + 4 * tp, 2))
    for index, found in enumerate(pushed(config, source, memory, tp=tp, ep=ep, ranks=ranks)):
        expected = expected_containers(config, full, tp=tp, ep=ep, rank=index % tp)
        assert_same(found, expected)


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_specs_are_the_names_shapes_and_dtypes_of_the_reference(name, tp, ep):
    config = MODELS[name]
    full = waves(config)
    for rank in range(tp):
        specs = target_containers(config, tp=tp, ep=ep, rank=rank)
        expected = expected_containers(config, full, tp=tp, ep=ep, rank=rank)
        assert {s.name: (s.shape, s.dtype, s.nbytes) for s in specs} == {
            name: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes)
            for name, t in expected.items()
        }
    side = target_side(config, tp=tp, ep=ep)
    assert [c.name for c in side.containers] == [s.name for s in specs]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("tp", "ep", "dp"), [(1, 2, 2), (2, 4, 2), (2, 1, 2), (1, 4, 4), (2, 2, 3)]
)
def test_data_parallel_groups_hold_all_but_the_experts_whole(name, tp, ep, dp):
    config = msgspec.structs.replace(MODELS[name], dtype="bfloat16")
    full = noise(config)
    source, memory = chunked(full, 3)
    size = tp * dp
    found = pushed(config, source, memory, tp=tp, ep=ep, dp=dp, ranks=tuple(range(2 * size)))
    for rank, held in enumerate(found):
        assert_same(held, expected_containers(config, full, tp=tp, ep=ep, dp=dp, rank=rank % size))


@pytest.mark.parametrize(
    ("vocab", "tp", "rows", "held"),
    [
        (97, 1, 128, [97]),
        (97, 2, 64, [64, 33]),
        # Padded to 64 first and cut then, as engines do, even where shares are no multiple of 64.
        (97, 4, 32, [32, 32, 32, 1]),
        (65, 4, 32, [32, 32, 1, 0]),
        (128, 4, 32, [32, 32, 32, 32]),
        (151_936, 4, 37_984, [37_984] * 4),
        # 128 rows are no three equal shares; 192 are.
        (97, 3, 64, [64, 33, 0]),
    ],
)
def test_vocabularies_are_padded_with_zeros_at_the_end(vocab, tp, rows, held):
    config = msgspec.structs.replace(
        SMALL["llama"], vocab=vocab, hidden=12, heads=12, kv_heads=12, head_dim=2, layers=1
    )
    full = waves(config)
    source, memory = chunked(full, 2)
    for rank, found in enumerate(pushed(config, source, memory, tp=tp)):
        assert_same(found, expected_containers(config, full, tp=tp, rank=rank))
        table = found["lm_head.weight"]
        assert table.shape == (rows, 12)
        start = rows * rank
        assert torch.equal(table[: held[rank]], full["lm_head.weight"][start : start + held[rank]])
        assert not table[held[rank] :].any()


@pytest.mark.parametrize(
    ("name", "tp", "ep", "replicas"),
    [
        pytest.param("llama-3.1", 2, 1, 1, marks=pytest.mark.long),
        pytest.param("qwen2", 4, 1, 2, marks=pytest.mark.long),
        pytest.param("qwen2_moe", 4, 4, 1, marks=pytest.mark.long),
        pytest.param("qwen3", 4, 1, 1, marks=pytest.mark.long),
        ("qwen3_moe", 4, 2, 2),
    ],
)
def test_a_checkpoint_goes_through_fsdp_into_an_engine_that_holds_the_same(
    name, tp, ep, replicas, tmp_path: Path
):
    config = SMALL[name]
    save_checkpoint(tmp_path, config, waves(config), shard_bytes=20_000)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    source, memory = fully_sharded(config, checkpoint, 3, replicas=replicas)
    ranks = pushed(config, source, memory, tp=tp, ep=ep)
    for rank, found in enumerate(ranks):
        assert_same(found, expected_containers(config, checkpoint, tp=tp, ep=ep, rank=rank))
    assert_same(full_parameters(config, ranks, ep=ep), checkpoint)


@pytest.mark.parametrize("name", SMALL | LATENT)
def test_containers_of_all_ranks_are_the_model_that_they_were_cut_from(name):
    config = (SMALL | LATENT)[name]
    full = waves(config)
    for tp, ep in MOE if config.moe else DENSE:
        ranks = [expected_containers(config, full, tp=tp, ep=ep, rank=rank) for rank in range(tp)]
        assert_same(full_parameters(config, ranks, ep=ep), full)


def test_whole_parameters_on_several_ranks_will_do_as_a_source():
    config: ModelConfig = SMALL["qwen3_moe"]
    full = waves(config)
    side = source_side(config, ranks=(5, 7))
    memory = {(rank, name): raw(tensor) for rank in side.ranks for name, tensor in full.items()}
    for rank, found in enumerate(pushed(config, side, memory, tp=2)):
        assert_same(found, expected_containers(config, full, tp=2, rank=rank))
