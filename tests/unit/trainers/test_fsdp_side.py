"""What FSDP2's ranks hold, by sizes alone, is what torch gives them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from fabric_ray.models import Moe
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.plan import Leaf, Side
from fabric_ray.weights.families import FamilyError, Indivisible, InvalidRanks
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.trainers import FsdpParallel, even_stages, fsdp_side
from tests.unit.families.pushes import Memory, assert_same, fully_sharded, noise, pushed, raw
from tests.unit.models.small_models import FROM_PUBLISHED, LAID_OUT, NESTED, SMALL, small

MODELS = {
    name: msgspec.structs.replace(config, dtype="bfloat16")
    for name, config in (SMALL | LAID_OUT | NESTED | FROM_PUBLISHED).items()
}


def placed(side: Side) -> dict[str, tuple[object, ...]]:
    """By container: tensor, ranks and placements."""
    leaves = {c.name: c.layout for c in side.containers}
    assert all(isinstance(leaf, Leaf) for leaf in leaves.values())
    return {name: (x.tensor, x.mesh.ranks, x.placements) for name, x in leaves.items()}


def test_a_dense_model_lies_as_fully_shard_puts_it() -> None:
    config = MODELS["llama"]
    reported, _ = fully_sharded(config, InitialWeights(config), 3)
    assert placed(fsdp_side(config, FsdpParallel(fsdp=3))) == placed(reported)


def chunked(
    full: dict[str, torch.Tensor], sizes: FsdpParallel, stages: tuple[int, ...], experts: int
) -> Memory:
    """Every rank's chunks, by who holds what in words: a layer's stage, an expert's group."""
    starts = [sum(stages[:stage]) for stage in range(len(stages))]
    memory: Memory = {}

    def held(name: str, tensor: torch.Tensor, ranks: list[int]) -> None:
        for rank, chunk in zip(ranks, tensor.chunk(len(ranks)), strict=False):
            memory[rank, name] = raw(chunk)

    def of_stage(stage: int) -> list[int]:
        return list(range(stage * sizes.stage_size, (stage + 1) * sizes.stage_size))

    for name, tensor in full.items():
        words = name.replace("model.language_model.", "model.").split(".")
        if words[1] == "layers":
            stage = max(s for s, start in enumerate(starts) if start <= int(words[2]))
        else:
            stage = 0 if "embed" in name else sizes.pp - 1
        ranks = of_stage(stage)
        if "experts" in words:
            group = int(words[words.index("experts") + 1]) // (experts // sizes.ep)
            ranks = [rank for rank in ranks if rank % sizes.ep == group]
        held(name, tensor, ranks)
    if "lm_head.weight" not in full and sizes.pp > 1:
        held(
            "lm_head.weight",
            next(t for n, t in full.items() if "embed_tokens" in n),
            of_stage(sizes.pp - 1),
        )
    return memory


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [0, 1])
def test_shards_of_stages_and_expert_groups_fill_an_engine(name: str, first: int) -> None:
    config = MODELS[name]
    stages = (first, config.layers - first) if first else (config.layers,)
    experts = config.moe.experts if config.moe else 0
    sizes = FsdpParallel(fsdp=3, pp=len(stages), ep=2 if experts else 1)
    full = noise(config)
    side = fsdp_side(config, sizes, stages=stages)
    memory = chunked(full, sizes, stages, experts)
    for rank, held in enumerate(pushed(config, side, memory, tp=2)):
        assert_same(held, expected_containers(config, full, tp=2, rank=rank))


def test_the_first_stages_take_the_remainder() -> None:
    assert even_stages(61, 8) == (8, 8, 8, 8, 8, 7, 7, 7)
    config = MODELS["llama"]
    assert config.layers == 3
    default = fsdp_side(config, FsdpParallel(fsdp=2, pp=2))
    assert default == fsdp_side(config, FsdpParallel(fsdp=2, pp=2), stages=(2, 1))


@pytest.mark.parametrize(
    ("model", "sizes", "stages", "error", "text"),
    [
        ("llama", {"fsdp": 0}, None, InvalidRanks, "fsdp=0 must be 1 or more"),
        ("llama", {"pp": 9}, None, InvalidRanks, "pp=9 stages are more than 3 layers"),
        ("llama", {"ep": 2}, None, InvalidRanks, "llama has no experts to spread; use ep=1"),
        ("kimi_k2", {"ep": 4}, None, Indivisible, "6 experts can't be shared evenly by ep=4"),
        ("llama", {"pp": 2}, (3, 0), InvalidRanks, "from 1 that add up to 3 layers"),
        ("llama", {"pp": 2}, (3,), InvalidRanks, "must be pp=2 numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    model: str,
    sizes: dict[str, int],
    stages: tuple[int, ...] | None,
    error: type[FamilyError],
    text: str,
) -> None:
    options: dict[str, Any] = {"stages": stages}
    with pytest.raises(error, match=text):
        fsdp_side(MODELS[model], FsdpParallel(**sizes), **options)


def test_stacked_experts_are_sharded_like_all_else_and_not_owned_by_groups() -> None:
    """gpt-oss: `mlp.experts.gate_up_proj` has no number of an expert in its name."""
    moe = Moe(experts=6, top_k=2, intermediate=48, stacked=True)
    config = small("gpt_oss", sinks=True, moe=moe)
    side = placed(fsdp_side(config, FsdpParallel(fsdp=2, pp=3)))
    tensor, ranks, _ = side["model.layers.1.mlp.experts.gate_up_proj"]
    assert (tensor.shape, ranks) == ((6, 32, 96), (2, 3))  # type: ignore[attr-defined]
    with pytest.raises(InvalidRanks, match=r"one parameter, which ep=2 groups.*use ep=1"):
        fsdp_side(config, FsdpParallel(fsdp=2, ep=2))
