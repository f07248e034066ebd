"""What the engine around a rollout is asked to do, in which order, whatever of it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights import EngineHooks, WeightTarget
from tests.unit.weights.local_sync import (
    ROLLOUTS,
    Fault,
    LocalSync,
    Module,
    expected,
    is_version,
)

AROUND = ["pause", "post_process", "flush", "version", "continue"]


class Engine(EngineHooks):
    """Says what it was asked for, and what it saw in the rollout's memory then."""

    target: WeightTarget

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[str] = []
        self.fails: set[str] = set()
        self.generating = True
        self.derived: torch.Tensor | None = None
        self.told: int | None = None
        self.seen: dict[str, Any] = {}

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        slabs, layout = self.target._staging, self.target._layout
        memory = [staging.views(layout)["norm"].clone() for staging in slabs]
        self.seen[what] = self.target.version, memory
        if what in self.fails:
            raise RuntimeError(f"no {what} today")

    def pause_generation(self) -> None:
        self.generating = False
        self._ask("pause")

    def post_process_weights(self, weights: Any) -> None:
        self._ask("post_process")
        self.derived = 2 * weights["norm"]

    def flush_cache(self) -> None:
        self._ask("flush")

    def update_weight_version(self, version: int) -> None:
        self._ask("version")
        self.told = version

    def continue_generation(self) -> None:
        self.generating = True
        self._ask("continue")


@pytest.fixture
def open_sync() -> Iterator[Callable[..., tuple[LocalSync, list[Engine]]]]:
    """Makes controllers whose rollouts run version 1, with an engine around each."""
    made = []

    def open_(**options: Any) -> tuple[LocalSync, list[Engine]]:
        engines = [Engine(rank) for rank in range(options.get("engines", 1) * ROLLOUTS)]
        sync = LocalSync(hooks=engines.__getitem__, **options)
        made.append(sync)
        for engine, target in zip(engines, sync.targets, strict=True):
            engine.target = target
        sync.train(1)
        sync.push()
        sync.train(2)
        for engine in engines:
            engine.asked.clear()
        return sync, engines

    yield open_
    for sync in made:
        sync.close()


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_stands_still_while_its_weights_change(open_sync, staged: bool) -> None:
    sync, engines = open_sync(staged=staged)
    sync.targets[0].on_commit(lambda _: engines[0].asked.append("on_commit"))
    before = expected(0, 1)["norm"]
    sync.push()
    assert engines[0].asked == ["pause", "on_commit", *AROUND[1:]]
    assert engines[1].asked == AROUND
    for engine in engines:
        version, memory = engine.seen["pause"]
        assert version == 1, "the flip comes after the pause"
        assert any(torch.equal(copy, before) for copy in memory), "no byte in use has changed yet"
        assert torch.equal(engine.derived, 2 * expected(engine.rank, 2)["norm"])
        assert engine.told == 2
        assert engine.generating


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("what", AROUND[1:])
def test_a_failing_hook_is_named_and_the_rest_is_asked(open_sync, what: str, staged: bool) -> None:
    sync, engines = open_sync(staged=staged)
    engines[1].fails = {what}
    with pytest.raises(WeightSyncError, match=f"in use everywhere.*no {what} today") as caught:
        sync.push()
    assert set(caught.value.failed) == {"rollout 1"}
    assert sync.version == 2
    assert list(sync.broken(set(), before=2)) == []
    assert [engine.asked[:4] for engine in engines] == [AROUND[:4], AROUND[:4]]
    # RS-1: an engine with old caches or derived tensors doesn't go on.
    assert engines[0].generating
    assert engines[1].generating == (what == "continue")
    engines[1].fails, sync.fault = set(), Fault("target_confirm", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError, match="aborted"):
        sync.push()
    assert engines[1].generating == (what == "continue" and staged)
    sync.fault = None
    sync.push()
    assert engines[1].generating


def test_rs_3_a_rollout_that_cannot_pause_keeps_its_version_and_goes_on(open_sync) -> None:
    sync, engines = open_sync()
    engines[1].fails = {"pause"}
    with pytest.raises(WeightSyncError, match=r"not at rollout 1: .*pause_gen") as caught:
        sync.push()
    assert set(caught.value.failed) == {"rollout 1"}
    assert [target.version for target in sync.targets] == [2, 1]
    assert list(sync.broken({"rollout 1"}, before=1)) == []
    assert engines[1].asked == ["pause", "continue"]
    engines[1].fails = set()
    sync.train(3)
    sync.push()
    assert list(sync.broken(set(), before=3)) == []


def test_in_place_a_pause_that_fails_leaves_all_as_they_were(open_sync) -> None:
    sync, engines = open_sync(staged=False)
    engines[1].fails = {"pause"}
    with pytest.raises(WeightSyncError, match=r"aborted.*did not begin: rollout 1: pause_gen"):
        sync.push()
    assert [engine.asked for engine in engines] == [["pause", "continue"]] * 2
    assert list(sync.broken(set(), before=1)) == [], "nothing was written, so all can be used"


def test_in_place_an_engine_that_cannot_go_on_after_an_abort_is_named(open_sync) -> None:
    sync, engines = open_sync(staged=False)
    engines[0].fails = {"continue"}
    engines[1].fails = {"pause"}
    with pytest.raises(WeightSyncError, match="then rollout 0: continue_gen") as caught:
        sync.push()
    assert set(caught.value.failed) == {"rollout 0", "rollout 1"}


def test_rs_3_nothing_is_generated_with_weights_that_a_failed_push_overwrote(open_sync) -> None:
    sync, engines = open_sync(staged=False)
    sync.fault = Fault("target_confirm", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError):
        sync.push()
    # One that couldn't even be announced changes nothing about it.
    sync.fault = Fault("target_begin", "rollout 0", "is not asked")
    with pytest.raises(WeightSyncError):
        sync.push()
    assert [e.generating for e in engines] == [False, False], (
        "RS-3: half a version generates nothing"
    )
    assert all(target._torn for target in sync.targets)
    sync.fault = None
    sync.push()
    assert [engine.generating for engine in engines] == [True, True]
    assert [engine.asked for engine in engines] == [AROUND, AROUND], "each once, in all"


def test_staged_a_failed_push_asks_nothing_of_an_engine(open_sync) -> None:
    sync, engines = open_sync()
    sync.fault = Fault("target_confirm", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError):
        sync.push()
    assert [engine.asked for engine in engines] == [[], []]


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_that_joins_pauses_before_it_is_given_a_version(open_sync, staged: bool) -> None:
    sync, _ = open_sync(staged=staged, engines=2)
    joins = Engine(1)
    sync._hooks = lambda _: joins
    who = sync.another(rank=1)
    joins.target = sync.targets[-1]
    sync.join(who)
    assert joins.asked == AROUND
    version, memory = joins.seen["pause"]
    assert version is None
    assert staged or not any(views.any() for views in memory), "no byte was written before"
    assert joins.told == 1
    joins.fails = {"flush"}
    failing = sync.another(rank=1)
    joins.target = sync.targets[-1]
    with pytest.raises(WeightSyncError, match="a hook failed at rollout 5: flush_cache"):
        sync.join(failing)
    assert sync.rollouts == (0, 1, 2, 3, 4), "it has no part in anything"


def lose(*_: object) -> None:
    raise RuntimeError("the device is lost")


@pytest.mark.parametrize("into", [False, True])
def test_rs_3_a_commit_that_fails_before_it_changes_anything_lets_the_engine_go_on(
    open_sync, monkeypatch: pytest.MonkeyPatch, into: bool
) -> None:
    modules = [Module(), Module()]
    sync, engines = open_sync(**{"into": modules.__getitem__} if into else {})
    with monkeypatch.context() as patched:
        patched.setattr("fabric_ray.weights.target.wait_for_readers", lose)
        with pytest.raises(WeightSyncError, match="the device is lost"):
            sync.push()
    assert [engine.asked for engine in engines] == [["pause", "continue"]] * 2
    for target, module in zip(sync.targets, modules, strict=True):
        assert target.version == 1
        with target.reading() as weights:
            assert is_version(weights, target.rank, 1), "RS-3: with the bytes of that version"
        assert not into or torch.equal(module.norm, expected(target.rank, 1)["norm"])
    sync.train(3)
    assert sync.push(3).version == 3
    assert list(sync.broken(set(), before=3)) == []


def test_rs_3_an_engine_with_parts_of_two_versions_stands_still_whatever_fails_next(
    open_sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [Module(), Module()]
    sync, engines = open_sync(into=modules.__getitem__)

    def copy_half(arrived: Any) -> None:
        module.partly_filled = True
        module.tensors()["w"].copy_(arrived["w"])
        lose()

    def refuse(_: object) -> None:
        raise WeightSyncError("not today")

    module = sync.targets[0]._into
    with monkeypatch.context() as patched:
        patched.setattr(module, "copy", copy_half)
        with pytest.raises(WeightSyncError, match="the device is lost"):
            sync.push()
    with monkeypatch.context() as patched:
        patched.setattr("fabric_ray.weights.target.wait_for_readers", refuse)
        with pytest.raises(WeightSyncError, match="not today"):
            sync.push()
    assert not engines[0].generating
    sync.train(4)
    sync.push()
    assert engines[0].generating
    assert torch.equal(modules[0].norm, expected(0, 4)["norm"])


def test_rs_1_an_engine_whose_hooks_were_interrupted_stands_still_until_the_next_version(
    open_sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, engines = open_sync()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engines[0], "flush_cache", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
    sync.fault = Fault("source_push", "trainer 0", "is not asked")
    with pytest.raises(WeightSyncError, match="aborted"):
        sync.push()
    assert not engines[0].generating, "its caches are of the version before"
    sync.fault = None
    sync.push()
    assert engines[0].generating


class CtrlC:
    """Interrupts the controller in front of a call."""

    def __init__(self, call: int = 1) -> None:
        self._left = call

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stage", "staged"),
    [
        ("target_pass_on", False),
        ("source_push", True),
        ("source_push", False),
        ("target_confirm", True),
    ],
)
def test_rs_3_engines_go_on_after_ctrl_c_unless_parts_of_a_version_are_written(
    open_sync, stage: str, staged: bool
) -> None:
    sync, engines = open_sync(staged=staged, engines=2, relay=stage == "target_pass_on")
    sync.before[stage] = CtrlC()
    with pytest.raises(KeyboardInterrupt):
        sync.push()
    sync.before.clear()
    written = not staged and stage == "source_push"
    for engine, target in zip(engines, sync.targets, strict=True):
        assert (engine.generating, target._torn) == (not written, written)
        if not written:
            assert is_version(target.weights, target.rank, 1)
    sync.push()
    assert all(engine.generating for engine in engines)
    assert list(sync.broken(set(), before=2)) == []


def test_readers_do_not_wait_after_ctrl_c(open_sync) -> None:
    sync, _ = open_sync(timeout=600.0)
    sync.before["target_quiesce"] = CtrlC(call=2)
    with sync.targets[0].reading(), pytest.raises(KeyboardInterrupt):
        sync.push()
    assert [target._gate._is_closed for target in sync.targets] == [False, False]


def test_readers_do_not_wait_after_ctrl_c_in_a_join(open_sync) -> None:
    sync, engines = open_sync(staged=False, engines=2, timeout=600.0)
    sync.drop(2)
    sync.before["target_quiesce"] = CtrlC(call=2)
    with sync.targets[2].reading(), pytest.raises(KeyboardInterrupt):
        sync.join("rollout 2")
    sync.before.clear()
    assert not sync.targets[2]._gate._is_closed
    assert engines[2].generating
    assert sync.join("rollout 2").version == 1


@pytest.mark.parametrize("stage", ["target_give", "target_confirm", "target_commit"])
@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_that_could_not_join_goes_on_with_what_it_has(
    open_sync, staged: bool, stage: str
) -> None:
    sync, engines = open_sync(staged=staged, engines=2, timeout=2.0)
    who, target, engine = "rollout 2", sync.targets[2], engines[2]
    sync.drop(2)
    sync.fault = Fault(stage, "rollout 0" if stage == "target_give" else who, "is not asked")
    with pytest.raises(WeightSyncError):
        sync.join(who)
    assert not target._gate._is_closed
    if staged:
        assert engine.generating
        assert is_version(target.weights, 0, 1)
    else:  # its bytes may be of two versions
        assert (engine.generating, target._torn) == (False, True)
    sync.fault = None
    assert sync.join(who).version == 1
    assert engine.generating
    assert is_version(target.weights, 0, 1)


def test_an_engine_that_was_read_too_long_to_join_goes_on(open_sync) -> None:
    sync, engines = open_sync(staged=False, engines=2, timeout=0.5)
    target, engine = sync.targets[2], engines[2]
    sync.drop(2)
    with target.reading(), pytest.raises(WeightSyncError, match="did not stop reading"):
        sync.join("rollout 2")
    assert not target._gate._is_closed
    assert engine.generating
    assert is_version(target.weights, 0, 1)
