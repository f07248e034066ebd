"""What Megatron-Core's ranks hold fills inference engines bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig, config_from_hf
from fabric_ray.models.kinds import ARCHITECTURES
from fabric_ray.plan import Side, plan
from fabric_ray.weights.families import (
    Family,
    IncompleteFamily,
    Indivisible,
    InvalidRanks,
    Part,
    Rule,
    UnknownFamily,
    Whole,
    target_side,
)
from fabric_ray.weights.local import check_local
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.source_tensors import SourceTensors
from fabric_ray.weights.trainers import Parallel, local_tensors, megatron_family, megatron_side
from tests.examples import examples
from tests.unit.families.pushes import Memory, assert_same, noise, pushed, raw
from tests.unit.models.small_models import FROM_PUBLISHED, LAID_OUT, PUBLISHED, SMALL, small
from tests.unit.trainers.megatron_rules import Rank, Sizes

MODELS = {
    name: msgspec.structs.replace(config, dtype="bfloat16")
    for name, config in (SMALL | LAID_OUT | FROM_PUBLISHED).items()
    if not ARCHITECTURES[config.kind].unknown_megatron
}
MODELS["one kv head"] = small("llama", kv_heads=1, qkv_bias=True, dtype="bfloat16")
MODELS["many kv heads"] = small("llama", kv_heads=4, qkv_bias=True, dtype="bfloat16")
FULL = {name: noise(config) for name, config in MODELS.items()}
ENGINES = [(1, 1), (2, 1), (2, 2), (4, 2)]
VOCAB_MULTIPLE = 5


def trained(name: str, sizes: Sizes, **options: Any) -> tuple[Side, list[dict[str, torch.Tensor]]]:
    """The side of a trainer, and the tensors that torch gives its ranks."""
    config, te, grouped = MODELS[name], options["te"], options["grouped"]
    side = megatron_side(
        config,
        parallel(sizes),
        layers="te" if te else "local",
        experts="grouped" if grouped else "sequential",
        stages=options["stages"],
        vocab_multiple=VOCAB_MULTIPLE,
    )
    ranks = [
        Rank(config, FULL[name], sizes, rank, vocab_multiple=VOCAB_MULTIPLE, **options).tensors()
        for rank in range(sizes.world)
    ]
    return side, ranks


def parallel(sizes: Sizes) -> Parallel:
    order = "tp-cp-ep-dp-pp" if sizes.pp_last else "tp-cp-ep-pp-dp"
    fields = {k: v for k, v in sizes._asdict().items() if k != "pp_last"}
    return Parallel(**fields, order=order)


def memory_of(ranks: list[dict[str, torch.Tensor]]) -> Memory:
    return {(r, name): raw(t) for r, held in enumerate(ranks) for name, t in held.items()}


@st.composite
def trainers(draw: st.DrawFn, config: ModelConfig) -> tuple[Sizes, dict[str, Any]]:
    """Parallel sizes that suit a model, and how it is built."""
    of = st.sampled_from
    tp, cp, dp, pp = draw(of([1, 2])), draw(of([1, 2])), draw(of([1, 2, 3])), draw(of([1, 2]))
    stage = tp * cp * dp
    eps = [ep for ep in (1, 2, 3, 6) if config.moe and stage % ep == 0] or [1]
    ep = draw(of(eps))
    etp = draw(of([etp for etp in (1, 2) if stage % (ep * etp) == 0]))
    vpp = draw(of([1, 2])) if pp > 1 else 1
    sizes = Sizes(
        tp, cp, dp, pp, ep, etp, vpp, pp == 1 or tp * cp != ep * etp or draw(st.booleans())
    )
    cuts = sorted(
        draw(st.lists(st.integers(0, config.layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    )
    stages = [b - a for a, b in zip([0, *cuts], [*cuts, config.layers], strict=True)]
    return sizes, {"te": draw(st.booleans()), "grouped": draw(st.booleans()), "stages": stages}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_every_rank_holds_what_torch_cuts_and_engines_get_every_bit(name, data):
    config = MODELS[name]
    sizes, options = data.draw(trainers(config))
    tp, ep = data.draw(st.sampled_from([e for e in ENGINES if config.moe or e[1] == 1]))
    side, ranks = trained(name, sizes, **options)
    planned = plan(side, target_side(config, tp=tp, ep=ep))
    for rank, held in enumerate(ranks):
        check_local(held, planned.local_containers("source", rank), rank)
    for rank, found in enumerate(pushed(config, side, memory_of(ranks), tp=tp, ep=ep)):
        assert_same(found, expected_containers(config, FULL[name], tp=tp, ep=ep, rank=rank))


def test_replicas_share_the_sending():
    """Context- and data-parallel ranks hold the same, so each sends a part."""
    side = megatron_side(MODELS["qwen3"], Parallel(tp=2, cp=2, dp=2, pp=3))
    balance = plan(side, target_side(MODELS["qwen3"], tp=2), min_split_bytes=1).balance()
    for first in (0, 1, 8, 9, 16, 17):
        replicas = [balance.sent[rank] for rank in range(first, first + 8, 2)]
        assert max(replicas) <= 1.02 * sum(replicas) / len(replicas)


def test_a_tied_embedding_is_sent_by_first_and_last_stage():
    config = msgspec.structs.replace(MODELS["qwen2"], layers=2)
    side = megatron_side(config, Parallel(pp=2))
    held = [c.ranks for c in side.containers if c.name.startswith(("embedding", "output"))]
    assert held == [(0,), (1,)]
    alone = megatron_side(config, Parallel())
    assert "output_layer.weight" not in {c.name for c in alone.containers}


class Wrapped(nn.Module):
    """As Megatron wraps a model for mixed precision and data parallelism."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_local_tensors_are_those_of_the_innermost_modules():
    router = nn.Module()
    router.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    router.register_buffer("expert_bias", torch.ones(2, dtype=torch.bfloat16))
    router.register_buffer("local_tokens_per_expert", torch.ones(2))
    core = nn.ModuleDict({"mlp": nn.ModuleDict({"router": router})})
    names = {"mlp.router.weight", "mlp.router.expert_bias"}
    assert local_tensors(Wrapped(Wrapped(core))).keys() == names
    parts = local_tensors([Wrapped(core), core])
    assert parts.keys() == {f"model{i}.{name}" for i in range(2) for name in names}
    assert parts["model1.mlp.router.weight"] is router.weight
    assert parts["model0.mlp.router.expert_bias"].dtype == torch.float32


def test_rs_1_a_source_follows_a_module_that_is_moved(open_engine: Callable[..., TransferEngine]):
    """`Module.to` gives a module other buffers, as offloading does."""
    router = nn.Linear(2, 2)
    router.register_buffer("expert_bias", torch.ones(2))
    core = nn.ModuleDict({"mlp": nn.ModuleDict({"router": router})})
    tensors = local_tensors(core)
    del tensors["mlp.router.bias"]
    source = SourceTensors(tensors, open_engine())
    core._apply(torch.clone)
    router.expert_bias.fill_(3)
    source.refresh()
    assert source.tensors.keys() == {"mlp.router.weight", "mlp.router.expert_bias"}
    assert source.local("mlp.router.expert_bias").tolist() == [3, 3]


@pytest.mark.parametrize("wrapped", [False, True], ids=["removed", "wrapped"])
def test_rs_1_a_source_pushes_no_parameter_that_a_module_has_no_longer(
    open_engine: Callable[..., TransferEngine], wrapped: bool
) -> None:
    core = nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})
    source = SourceTensors(local_tensors(core), open_engine())
    source.remember_layouts()
    down = core.pop("down")
    if wrapped:  # as adapters wrap layers
        core["down"] = nn.ModuleDict({"to_wrap": down, "lora": nn.Linear(2, 2)})
    with pytest.raises(InvalidArgument, match=r"`down\.(weight|bias)` has been removed"):
        source.refresh_moved()


def test_rs_1_a_tensor_that_is_put_in_the_place_of_a_modules_is_pushed(
    open_engine: Callable[..., TransferEngine],
) -> None:
    tensors = local_tensors(nn.Linear(2, 2))
    tensors["weight"] = torch.full((2, 2), 3.0)
    source = SourceTensors(tensors, open_engine())
    source.refresh()
    assert source.local("weight").tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 0}, "tp=0 must be 1 or more"),
        ({"etp": 0}, "etp=0 must be 1 or more"),
        ({"vpp": 2}, "vpp=2 needs a pipeline"),
        ({"tp": 2, "ep": 3}, "etp=2 times ep=3 doesn't divide the 2 ranks of a stage"),
        ({"order": "tp-dp-pp"}, "must name each of tp, cp, ep, dp, pp once"),
        ({"tp": 2, "etp": 1, "dp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"}, "put pp last"),
    ],
)
def test_parallel_sizes_that_mean_nothing(sizes, words):
    with pytest.raises(InvalidRanks, match=words):
        Parallel(**sizes)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "kind", "words"),
    [
        ("llama", {"pp": 2}, {}, Indivisible, "3 layers can't be shared evenly by pp=2"),
        ("llama", {"pp": 2}, {"stages": [1, 1]}, InvalidRanks, "add up to 3 layers"),
        ("llama", {"pp": 2}, {"stages": [3]}, InvalidRanks, "must be 2 numbers"),
        ("llama", {"tp": 3}, {}, Indivisible, "the 2 kv heads .*q_proj.* by 3 ranks"),
        ("deepseek_v3", {"tp": 8}, {}, Indivisible, "q_b_proj.* by 8 ranks without cutting a head"),
        ("qwen3_moe", {"dp": 4, "ep": 4}, {}, Indivisible, "6 experts .* by ep=4"),
        ("llama", {"dp": 4, "ep": 4}, {}, InvalidRanks, "llama has no experts .*use ep=1"),
    ],
)
def test_models_that_the_ranks_cannot_share(name, sizes, options, kind, words):
    with pytest.raises(kind, match=words):
        megatron_side(MODELS[name], Parallel(**sizes), **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_laid_out_or_refused_with_the_reason(name):
    config = config_from_hf(PUBLISHED[name]["config"], quantised=True)
    why = ARCHITECTURES[config.kind].unknown_megatron or (config.nest and "the text model of")
    if not why:
        assert config.kind in {model.kind for model in MODELS.values()}
        return
    with pytest.raises(UnknownFamily, match="ModuleReplica") as caught:
        megatron_side(config, Parallel())
    assert why in str(caught.value)


def test_a_table_of_ones_own_is_all_that_another_trainer_needs():
    rules = tuple(
        Rule(name.replace("model.", "mine."), (Part(name, Whole()),))
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    )
    config = MODELS["llama"]
    with pytest.raises(IncompleteFamily, match=r"mine has no rule for .*layers\.0"):
        megatron_side(config, Parallel(), family=Family("mine", rules))
    table = megatron_family(vocab_multiple=7)
    assert megatron_side(config, Parallel(), family=table) == megatron_side(
        config, Parallel(), vocab_multiple=7
    )
