"""Pushes of what changed: the same bytes as a whole push, or a whole push."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Cast, Formats, Fp8
from tests.examples import by_turns
from tests.unit.weights.delta_world import Pair, World
from tests.unit.weights.local_sync import Fault, InProcess, LocalSync

_FORMATS: dict[str, tuple[Formats, dict[str, str]]] = {
    "same": ({}, {}),
    "cast": ({"*": Cast("bfloat16")}, {"dtype": "float32"}),
    "fp8": ({"up": Fp8((16, 16)), "down": Fp8((16, 16))}, {}),
}
_KEPT: dict[str, dict[str, bool]] = {
    "staged": {},
    "in place": {"staged": False},
    "into": {"into": True},
}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    monkeypatch.setattr("fabric_ray.weights.session._GATE_S", 1.0)
    made: list[Pair] = []

    def open_(**options: Any) -> Pair:
        made.append(Pair(**options))
        return made[-1]

    yield open_
    for one in made:
        one.close()


def _causes(report: Any) -> set[str | None]:
    return {link.whole for link in report.links}


@pytest.mark.parametrize("kept", _KEPT)
def test_few_changes_send_few_bytes(pair: Callable[..., Pair], kept: str) -> None:
    both = pair(**_KEPT[kept])
    both.train(1.0, 0)
    first = both.push()
    assert first.nbytes == first.version_nbytes
    assert all("no whole version" in str(cause) for cause in _causes(first))
    both.train(0.03, 1)
    second = both.push()
    # The norm and the rows of down_proj are shorter than what describes their changes.
    assert second.nbytes < 0.15 * second.version_nbytes
    assert "changes only" in str(second)
    assert not both.differ()
    unchanged = both.push()
    assert unchanged.nbytes < 0.02 * unchanged.version_nbytes
    assert not both.differ()


def test_large_changes_are_sent_whole(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.train(1.0, 0)
    both.push()
    both.train(1.0, 1)
    report = both.push()
    assert report.nbytes == report.version_nbytes
    assert all("more than 1/4" in str(cause) for cause in _causes(report))
    assert not both.differ()


@pytest.mark.parametrize("kept", _KEPT)
def test_rs_3_a_corrupt_base_is_replaced(pair: Callable[..., Pair], kept: str) -> None:
    both = pair(**_KEPT[kept])
    both.train(1.0, 0)
    both.push()
    both.train(0.03, 1)
    both.delta.spoil(1, "up")
    report = both.push()
    assert report.differed == ("rollout 1",)
    assert report.nbytes == report.version_nbytes
    assert not both.differ()
    both.train(0.03, 2)
    report = both.push()
    assert not report.differed
    assert report.nbytes < 0.15 * report.version_nbytes
    assert not both.differ()


def test_corrupt_changes_are_found(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.train(1.0, 0)
    both.push()
    both.train(0.03, 1)

    def spoil() -> None:
        inbox = both.delta.targets[0]._inbox
        assert inbox is not None
        both.delta.before.clear()
        inbox._memory._memory[:4096] = 0xFF

    both.delta.before["target_confirm"] = spoil
    assert both.push().differed == ("rollout 0",)
    assert not both.differ()


@pytest.mark.parametrize(
    ("kept", "stage"), by_turns([*_KEPT], ["source_push", "target_confirm", "target_commit"])
)
def test_a_push_after_a_failed_one_is_whole(
    pair: Callable[..., Pair], kept: str, stage: str
) -> None:
    both = pair(**_KEPT[kept])
    both.train(1.0, 0)
    both.push()
    both.train(0.03, 1)
    who = "trainer 1" if stage == "source_push" else "rollout 1"
    for world in (both.delta, both.whole):
        world.fault = Fault(stage, world.prefix + who, "is not asked")
        with pytest.raises(WeightSyncError):
            world.push()
        world.fault = None
    both.train(0.03, 2)
    report = both.push()
    assert not both.differ()
    if stage == "target_confirm":
        assert report.nbytes == report.version_nbytes
    both.train(0.03, 3)
    assert both.push().nbytes < 0.15 * report.version_nbytes
    assert not both.differ()


@pytest.mark.long
def test_a_reader_keeps_its_version_while_changes_arrive(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.train(1.0, 0)
    both.push()
    before = both.delta.in_use(0)
    seen = []
    both.delta.before["target_commit"] = lambda: seen.append(both.delta.in_use(0))
    both.train(0.03, 1)
    both.push()
    assert all(torch.equal(seen[0][name], before[name]) for name in before)
    assert not both.differ()


def test_replicas_that_relay_get_whole_versions(pair: Callable[..., Pair]) -> None:
    both = pair(engines=2, relay=True)
    both.train(1.0, 0)
    both.push()
    both.train(0.03, 1)
    report = both.push()
    assert report.nbytes == report.version_nbytes
    assert _causes(report) == {"the rollout passes the version on to replicas"}
    assert not both.differ()


@pytest.mark.parametrize("kept", _KEPT)
def test_a_version_may_come_whole_in_between(pair: Callable[..., Pair], kept: str) -> None:
    both = pair(delta=True, **_KEPT[kept])
    both.train(1.0, 0)
    both.push()
    both.train(0.03, 1)
    both.push()
    choice = both.delta._session._choice
    choice._left, choice._slow = 2, 1.5
    for step in (2, 3):
        both.train(0.03, step)
        report = both.push()
        assert report.nbytes == report.version_nbytes
        assert all("longer than a whole push: 1.500 s" in str(why) for why in _causes(report))
        assert not both.differ()
    both.train(0.03, 4)
    report = both.push()
    assert report.nbytes == report.version_nbytes
    assert {why.rpartition(": ")[2] for why in _causes(report)} == {"none since connect"}
    both.train(0.03, 5)
    report = both.push()
    assert report.nbytes < 0.15 * report.version_nbytes
    assert not both.differ()


def test_delta_is_true_false_or_always() -> None:
    with pytest.raises(InvalidArgument, match="expected True, False or 'always'"):
        LocalSync(delta="allways")


@pytest.mark.parametrize(("formats", "kept"), by_turns([*_FORMATS], [*_KEPT]))
@pytest.mark.parametrize("seed", range(1))
def test_any_course_ends_with_the_bytes_of_whole_pushes(
    pair: Callable[..., Pair], formats: str, kept: str, seed: int
) -> None:
    draw = random.Random(f"{formats} {kept} {seed}")
    made, options = _FORMATS[formats]
    both = pair(
        delta=True,
        engines=draw.choice([1, 2]),
        relay=draw.random() < 0.2,
        digest=draw.random() < 0.3,
        formats=made or None,
        **options,
        **_KEPT[kept],
    )
    worlds: tuple[World, World] = (both.delta, both.whole)
    both.train(1.0, 0)
    both.push()
    for step in range(1, 9):
        both.train(draw.choice([0.0, 0.001, 0.03, 0.03, 0.1, 0.4, 1.0]), step)
        match draw.choice(["push", "push", "whole", "corrupt", "fail", "replace", "connect"]):
            case "whole":
                both.delta._session._choice._left = draw.choice([1, 2])
            case "corrupt":
                number = draw.choice(both.delta.rollouts)
                both.delta.spoil(number, draw.choice(["embed", "up", "down"]))
            case "fail":
                who = f"rollout {draw.choice(both.delta.rollouts)}"
                for world in worlds:
                    world.fault = Fault("target_confirm", world.prefix + who, "is not asked")
                    with pytest.raises(WeightSyncError):
                        world.push()
                    world.fault = None
            case "replace":
                number = draw.choice(both.delta.rollouts)
                for world in worlds:
                    rank = world.targets[number].rank
                    world.drop(number)
                    world.join(world.another(rank))
            case "connect":
                for world in worlds:
                    world.connect()
        both.push()
        assert not both.differ(), f"step {step}"


def test_replicas_of_an_engine_refuse_changes() -> None:
    sync = LocalSync(delta="always")
    try:
        with pytest.raises(InvalidArgument, match="leave delta=True away"):
            sync._replica_sides([], sync._side, sync._side)
    finally:
        sync.close()


def test_a_rollout_that_holds_nothing_takes_part(
    open_engine: Callable[..., TransferEngine],
) -> None:
    dtype = DType.of("float32")
    leaf = Leaf(Tensor("w", (2, 64), dtype), Mesh.line(3), (Shard(0),))
    side, weights = Side.of(3, [Container("w", dtype, leaf)]), torch.randn(2, 64)
    source = WeightSource({"w": weights}, rank=0, name="trainer", engine=open_engine("trainer"))
    names = [f"rollout {rank}" for rank in range(3)]
    targets = [
        WeightTarget(side, rank=rank, name=name, engine=open_engine(name))
        for rank, name in enumerate(names)
    ]
    sync = WeightSync(["trainer"], names, delta=True, timeout=5.0, calls=InProcess())
    for _ in range(2):
        weights[:, 0] += 1
        report = sync.push()
        for target, row in zip(targets, weights.split(1), strict=False):
            assert torch.equal(target.weights["w"], row)
        assert not targets[2].weights
    assert report.nbytes < report.version_nbytes
    for part in (source, *targets):
        part.close()
