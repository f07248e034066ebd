"""Pushes by way of replicas: every rollout holds, bit for bit, what whole tensors give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.weights.families import target_side
from fabric_ray.weights.quant import Fp8, Int8, linear_formats, quantise, quantised_target
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.replica import LayoutReplica
from fabric_ray.weights.step_sender import StepSender
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import LAID_OUT, SMALL
from tests.unit.replica.setups import Setup, closing, split


@pytest.fixture
def open_setup() -> Iterator[Callable[..., Setup]]:
    yield from closing([])


# Of 33 rows the last of four ranks has nothing but padding.
MODELS = SMALL | LAID_OUT | {"few words": structs.replace(SMALL["llama-3.1"], vocab=33)}
# Model, trainers by stage, tp, ep, dp, engines.
CASES = [
    ("llama", [1], 2, 1, 1, 1),
    ("llama-3.1", [2], 4, 1, 1, 1),
    ("few words", [2], 4, 1, 1, 2),
    ("qwen2", [3], 1, 1, 1, 4),
    ("qwen3", [2, 1], 2, 1, 1, 2),
    ("qwen3_moe", [2, 2], 4, 4, 1, 2),
    ("qwen2_moe", [3], 2, 2, 1, 2),
    ("glm4_moe", [1, 2, 1], 2, 1, 1, 1),
    ("deepseek_v3", [2, 2], 2, 4, 2, 1),
    ("deepseek_v2-lite", [1], 2, 2, 1, 1),
    ("kimi_k2", [5], 1, 3, 3, 1),
]


@pytest.mark.parametrize(("model", "stages", "tp", "ep", "dp", "engines"), CASES)
def test_every_rollout_holds_what_whole_tensors_give(
    open_setup: Callable[..., Setup],
    model: str,
    stages: list[int],
    tp: int,
    ep: int,
    dp: int,
    engines: int,
) -> None:
    config = MODELS[model]
    side = target_side(config, tp=tp, ep=ep, dp=dp, ranks=range(tp * dp * engines))
    full = {name: tensor.clone() for name, tensor in noise(config).items()}
    biggest = max(tensor.nbytes for tensor in full.values())
    setup = open_setup(
        list(zip(stages, split(full, len(stages)), strict=True)), side, bucket=biggest
    )
    for _ in range(2):
        report = setup.sync.push()
        for target in setup.targets:
            rank = target.rank % (tp * dp)
            expected = expected_containers(config, full, tp=tp, ep=ep, dp=dp, rank=rank)
            assert_same(target.weights, expected)
        for tensor in full.values():
            tensor.mul_(0.5)
    assert len(report.temporary) == sum(stages)


MIXED = MODELS["qwen3_moe"]
MIXED_FULL = noise(MIXED)
EXPERTS = target_side(MIXED, tp=2, ep=2, ranks=range(4))


def check_mixed(setup: Setup) -> None:
    for target in setup.targets:
        rank = target.rank % 2
        assert_same(target.weights, expected_containers(MIXED, MIXED_FULL, tp=2, ep=2, rank=rank))


@pytest.mark.parametrize("nbytes", [12_416, 13_000, 17_321, 50_000, 10_000_000])
def test_buckets_may_split_what_belongs_together(
    open_setup: Callable[..., Setup], nbytes: int
) -> None:
    setup = open_setup([(1, MIXED_FULL)], EXPERTS, bucket=nbytes)
    setup.sync.push()
    check_mixed(setup)


def test_rs_1_a_tensor_that_is_trained_while_it_waits_in_a_bucket_is_named(
    open_setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {name: tensor.clone() for name, tensor in MIXED_FULL.items()}
    setup = open_setup([(1, full)], EXPERTS, bucket=12_416)
    load = LayoutReplica.load

    def train_and_load(*args: Any) -> None:
        full["model.norm.weight"].add_(1)
        load(*args)

    with monkeypatch.context() as during:
        during.setattr(LayoutReplica, "load", train_and_load)
        with pytest.raises(WeightSyncError, match=r"parameter `model\.norm\.weight` was changed"):
            setup.sync.push()
    assert all(target.version is None for target in setup.targets)


def test_pieces_may_come_in_any_order_and_wait_for_each_other(
    open_setup: Callable[..., Setup],
) -> None:
    names = sorted(MIXED_FULL, key=lambda name: hash_of(name))
    gather = lambda: ((name, MIXED_FULL[name].clone()) for name in names)  # noqa: E731
    setup = open_setup([(2, gather)], EXPERTS, bucket=12_416)
    report = setup.sync.push()
    check_mixed(setup)
    whole = sum(tensor.nbytes for tensor in MIXED_FULL.values())
    assert 12_416 < report.temporary[0].gathered < whole


def hash_of(name: str) -> int:
    return sum(name.encode()) * 7919 % 1009


def test_a_later_push_registers_gathers_and_plans_nothing_anew(
    open_setup: Callable[..., Setup],
) -> None:
    setup = open_setup([(2, MIXED_FULL)], EXPERTS, bucket=12_416)
    setup.sync.push()
    before = [(source._filling, dict(source._memory._regions)) for source in setup.sources]
    routes = [dict(source._filling._routes._known) for source in setup.sources]  # type: ignore[union-attr]
    setup.sync.push()
    setup.sync.push()
    assert before == [(s._filling, dict(s._memory._regions)) for s in setup.sources]
    assert routes == [s._filling._routes._known for s in setup.sources]  # type: ignore[union-attr]
    assert all(len(source._memory._regions) == 1 for source in setup.sources)
    setup.sync.connect()
    assert [s._memory._regions for s in setup.sources] == [regions for _, regions in before]
    setup.sync.push()
    check_mixed(setup)


def test_memory_is_loaded_again_only_when_what_lay_there_has_been_sent(
    open_setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    send, wait_for, load = StepSender.send, StepSender.wait_for, LayoutReplica.load

    def noted(what: str, number: int) -> None:
        events.append((what, number))

    monkeypatch.setattr(
        StepSender, "send", lambda s, step, *rest: (noted("send", step), send(s, step, *rest))
    )
    monkeypatch.setattr(
        StepSender, "wait_for", lambda s, step: (noted("sent", step), wait_for(s, step))
    )
    monkeypatch.setattr(
        LayoutReplica, "load", lambda r, rank, t: (noted("load", rank), load(r, rank, t))
    )
    setup = open_setup([(1, MIXED_FULL)], EXPERTS, bucket=50_000)
    setup.sync.connect()
    events.clear()
    setup.sync.push()
    filling = setup.sources[0]._filling
    assert filling is not None
    sent = number = -1
    for what, value in events:
        if what == "sent":
            sent = max(sent, value)
        elif what == "load":
            number += 1
            assert (filling._loads[number].rank, filling._loads[number].after <= sent) == (
                value,
                True,
            )
        else:
            assert value == number, "what was loaded last is sent"
    assert number == len(filling._loads) - 1
    waits = [load.after for load in filling._loads]
    # One rollout's load waits for the other's, in the same bucket; buckets don't wait.
    assert waits == [i - 1 if i % 2 else -1 for i in range(len(waits))]


def test_the_route_is_an_ordinary_plan_that_names_one_sender_for_each_rollout(
    open_setup: Callable[..., Setup],
) -> None:
    setup = open_setup([(1, part) for part in split(MIXED_FULL, 2)], EXPERTS)
    connected = setup.sync.connect()
    assert connected.copies == sum(
        len(setup.sync.plan.local_containers("target", rank)) for rank in range(4)
    ), "each engine tensor is sent whole"
    assert "trainer" not in setup.sync.explain()
    whole = {name.rpartition("@")[2] for name in setup.sync.plan.containers("source")}
    assert whole == {"0", "1"}, "replicas are given what is loaded once"
    links = {(link.src, link.dst) for link in setup.sync.plan.links()}
    assert links == {(src, dst) for src in range(2) for dst in range(4)}
    report = setup.sync.push()
    assert report.nbytes == connected.nbytes
    assert {span.stage for span in report.spans} >= {"gather", "load", "write"}


def test_trainers_may_send_once_and_rollouts_pass_it_on(
    open_setup: Callable[..., Setup],
) -> None:
    setup = open_setup([(2, MIXED_FULL)], EXPERTS, bucket=50_000, relay=True)
    for _ in range(2):
        sent = setup.sync.push().nbytes
        check_mixed(setup)
    one_engine = [sum(t.nbytes for t in target.weights.values()) for target in setup.targets[:2]]
    assert sent == sum(one_engine)


def test_a_replica_takes_the_memory_of_a_stage_of_one_rank(
    open_setup: Callable[..., Setup],
) -> None:
    parts = split(MIXED_FULL, 2)
    setup = open_setup([(1, part) for part in parts], EXPERTS)
    report = setup.sync.push()
    held = [sum(t.nbytes for t in target.weights.values()) for target in setup.targets]
    padding = 256 * len(EXPERTS.containers)
    assert sum(t.replica for t in report.temporary) <= max(held) + padding
    for temporary, part in zip(report.temporary, parts, strict=True):
        assert temporary.gathered == sum(tensor.nbytes for tensor in part.values())


@pytest.mark.parametrize("fmt", [Fp8((8, 8)), Fp8("channel"), Int8()], ids=str)
def test_whole_tensors_are_quantised_before_they_are_loaded(
    open_setup: Callable[..., Setup], fmt: Fp8 | Int8
) -> None:
    config = MODELS["llama"]
    generator = torch.Generator().manual_seed(5)
    full = {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in noise(config).items()
    }
    formats = linear_formats("llama", fmt)
    side = quantised_target(target_side(config, tp=2), formats)
    setup = open_setup([(2, full)], side, formats=formats, bucket=13_000)
    setup.sync.push()
    name = "model.layers.1.mlp.down_proj.weight"
    values, scales = quantise(full[name], fmt)
    assert scales is not None
    for target in setup.targets:
        assert torch.equal(
            target.weights[name].view(torch.uint8),
            values.chunk(2, dim=1)[target.rank].contiguous().view(torch.uint8),
        )
        kept = next(t for n, t in target.weights.items() if n.startswith(name + "_"))
        by_column = scales.shape[1] > 1
        expected = scales.chunk(2, dim=1)[target.rank] if by_column else scales
        assert torch.equal(kept, expected)
    fused = "model.layers.0.mlp.gate_up_proj.weight"
    halves = [
        quantise(full[fused.replace("gate_up", part)], fmt)[0].view(torch.uint8).chunk(2)[1]
        for part in ("gate", "up")
    ]
    assert torch.equal(setup.targets[1].weights[fused].view(torch.uint8), torch.cat(halves))


def test_formats_belong_to_the_sources(open_setup: Callable[..., Setup]) -> None:
    setup = open_setup([(1, MIXED_FULL)], EXPERTS)
    setup.sync._formats = linear_formats("qwen3_moe", Int8())
    with pytest.raises(InvalidArgument, match="formats to every ReplicaSource"):
        setup.sync.connect()
