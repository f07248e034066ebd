"""Models, sizes and tables that make no engine are refused by name, with what would do."""

from __future__ import annotations

import msgspec
import pytest

from fabric_ray.errors import FabricError
from fabric_ray.weights.families import (
    FAMILIES,
    Family,
    FamilyError,
    IncompleteFamily,
    Indivisible,
    InvalidRanks,
    Part,
    Rule,
    Split,
    UnknownFamily,
    Whole,
    family_of,
    target_containers,
    target_side,
)
from fabric_ray.weights.families.tables import fused, same
from tests.unit.models.small_models import LAID_OUT, SMALL


@pytest.mark.parametrize(
    ("name", "tp", "ep", "kind", "words"),
    [
        ("llama", 0, 1, InvalidRanks, "tp=0, ep=1 and dp=1 must be 1 or more"),
        ("qwen3_moe", 2, 0, InvalidRanks, "tp=2, ep=0 and dp=1 must be 1 or more"),
        ("qwen3_moe", 4, 3, InvalidRanks, "ep=3 doesn't divide tp=4; use ep=1, 2 or 4"),
        ("llama", 2, 2, InvalidRanks, "llama has no experts to spread; use ep=1"),
        ("qwen3_moe", 8, 8, Indivisible, "6 experts can't be spread over ep=8"),
        ("qwen2", 3, 1, Indivisible, "qwen2: the 4 heads of .*q_proj.* shared evenly by 3 ranks"),
        ("qwen3", 8, 1, Indivisible, r"q_proj\.weight .*by 8 ranks; use tp=1, 2 or 4$"),
        ("qwen3_moe", 3, 3, Indivisible, "no tp does with ep=3"),
    ],
)
def test_sizes_that_make_no_engine(name, tp, ep, kind, words):
    for call in (
        lambda: target_side(SMALL[name], tp=tp, ep=ep),
        lambda: target_containers(SMALL[name], tp=tp, ep=ep, rank=0),
    ):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert isinstance(caught.value, FabricError)
        assert caught.value.fields["family"] == SMALL[name].kind


def test_data_parallel_sizes_are_named():
    config = SMALL["qwen3_moe"]
    with pytest.raises(InvalidRanks, match="dp=0 must be 1 or more"):
        target_side(config, tp=2, dp=0)
    with pytest.raises(InvalidRanks, match="ep=3 doesn't divide tp=2 times dp=2; use ep=1, 2 or 4"):
        target_side(config, tp=2, dp=2, ep=3)
    with pytest.raises(InvalidRanks, match=r"3 ranks don't make .* tp=1 times dp=2"):
        target_side(config, tp=1, dp=2, ranks=range(3))
    with pytest.raises(InvalidRanks, match=r"rank 4 is out of range \[0, 4\)"):
        target_containers(config, tp=2, dp=2, rank=4)
    with pytest.raises(Indivisible) as caught:
        target_side(config, tp=8, dp=3, ep=2)
    for tp in caught.value.fields["allowed"]:
        assert target_side(config, tp=tp, dp=3, ep=2)


def test_the_sizes_offered_do():
    config = SMALL["qwen2_moe"]
    with pytest.raises(Indivisible) as caught:
        target_side(config, tp=8, ep=2)
    offered = caught.value.fields["allowed"]
    assert offered
    for tp in offered:
        assert target_side(config, tp=tp, ep=2)


def test_columns_that_do_not_divide_are_named_with_their_size():
    config = msgspec.structs.replace(SMALL["llama"], intermediate=50)
    with pytest.raises(
        Indivisible, match=r"the 50 columns of .*gate_proj.* use tp=1 or 2"
    ) as caught:
        target_side(config, tp=4)
    assert caught.value.fields["parameter"] == "model.layers.0.mlp.gate_proj.weight"


def test_halves_of_a_fused_parameter_that_do_not_divide_are_named():
    """The parameter has 100 rows, but 4 ranks can't share the gate's 50."""
    config = msgspec.structs.replace(LAID_OUT["glm4"], intermediate=50)
    words = r"the 50 columns of each of the 2 parts of .*gate_up_proj.*size 100.* use tp=1 or 2"
    with pytest.raises(Indivisible, match=words):
        target_side(config, tp=4)


@pytest.mark.parametrize("ranks", [(), (0, 1, 2)])
def test_ranks_that_make_no_whole_replicas(ranks):
    with pytest.raises(InvalidRanks, match="whole replicas of tp=2; give a multiple"):
        target_side(SMALL["llama"], tp=2, ranks=ranks)


@pytest.mark.parametrize("sizes", [{"tp": 1 << 32}, {"tp": 2, "dp": 1 << 63}, {"ep": 1 << 64}])
def test_more_ranks_than_there_can_be_are_refused_before_they_are_laid_out(sizes):
    with pytest.raises(InvalidRanks, match="too many ranks; use at most 1048576"):
        target_side(SMALL["qwen3_moe"], **({"tp": 1} | sizes))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_replica(rank):
    with pytest.raises(InvalidRanks, match=rf"rank {rank} is out of range \[0, 2\)"):
        target_containers(SMALL["llama"], tp=2, rank=rank)


def test_an_unknown_family():
    with pytest.raises(UnknownFamily, match=r"'mamba'; use one of llama, .* or pass a Family"):
        family_of("mamba")


def without(family: Family, parameter: str) -> Family:
    rules = tuple(r for r in family.rules if parameter not in str(r.container))
    return Family("mine", rules)


def test_a_table_of_ones_own_is_used_and_checked():
    config = SMALL["llama"]
    table = FAMILIES["llama"]
    with pytest.raises(IncompleteFamily, match=r"no rule for parameter model\.norm\.weight"):
        target_side(config, tp=1, family=without(table, "model.norm"))
    twice = Family("mine", (*table.rules, same("model.norm.weight", Whole())))
    with pytest.raises(IncompleteFamily, match=r"uses parameter model\.norm\.weight twice"):
        target_side(config, tp=1, family=twice)
    more = Family(
        "mine",
        (
            *without(table, "model.norm").rules,
            fused("model.norms", ("model.norm.weight", Whole()), ("model.bias", Whole())),
        ),
    )
    with pytest.raises(IncompleteFamily, match=r"builds model\.norms from model\.bias, which the"):
        target_side(config, tp=1, family=more)
    rows = Family(
        "mine", (*without(table, "model.norm").rules, same("model.norm.weight", Split(0)))
    )
    specs = target_containers(config, tp=2, rank=1, family=rows)
    assert next(s.shape for s in specs if s.name == "model.norm.weight") == (16,)


def test_a_parameter_goes_to_the_first_rule_that_finds_all_it_needs():
    config, norm = SMALL["llama"], "model.norm.weight"
    rest = without(FAMILIES["llama"], "model.norm").rules

    def container(*rules: Rule) -> str:
        specs = target_containers(config, tp=1, rank=0, family=Family("mine", (*rest, *rules)))
        return specs[-2].name

    both = fused("both", (norm, Whole()), ("model.bias", Whole()))
    beside = Rule("beside", (Part(norm, Whole()),), beside="lm_head.weight")
    nowhere = Rule("nowhere", (Part(norm, Whole()),), beside="model.other")
    alone = Rule("alone", (Part(norm, Whole()),))
    assert container(both, alone) == "alone"
    assert container(both, nowhere, beside, alone) == "beside"
    with pytest.raises(IncompleteFamily, match="builds both from"):
        container(nowhere, both)
    with pytest.raises(IncompleteFamily, match=r"no rule for parameter model\.norm\.weight"):
        container(nowhere)
    with pytest.raises(IncompleteFamily, match=r"uses parameter model\.norm\.weight twice"):
        container(alone, beside)


def test_a_table_that_gives_each_expert_a_container_is_none_of_an_engine():
    table = FAMILIES["qwen3_moe"]
    rules = tuple(
        msgspec.structs.replace(
            rule, container=rule.container.replace("experts.", "experts.{expert}.")
        )
        for rule in table.rules
    )
    with pytest.raises(IncompleteFamily, match=r"layers\.0\.mlp\.experts\.\{expert\}.*stack them"):
        target_side(SMALL["qwen3_moe"], tp=1, family=Family("mine", rules))


def test_every_refusal_is_a_family_error():
    for kind in (IncompleteFamily, Indivisible, InvalidRanks, UnknownFamily):
        assert issubclass(kind, FamilyError)
        assert issubclass(kind, ValueError)
