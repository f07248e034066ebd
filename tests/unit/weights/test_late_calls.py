"""Calls that go on in an actor after their controller has stopped waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from typing import Any

import pytest

from fabric_ray.errors import Stale, WeightSyncError
from fabric_ray.weights import EngineHooks, WeightSource, WeightSync, WeightTarget, phases
from fabric_ray.weights.calls import CallFailure
from fabric_ray.weights.quant import Fp8
from fabric_ray.weights.readers import ReaderGate
from tests.unit.weights.delta_world import World
from tests.unit.weights.local_sync import LocalSync, Module, is_version
from tests.unit.weights.test_takeover import by_others, other_trainers

__all__ = ["other_trainers"]


class Late(LocalSync):
    """Actors of several threads: a call that isn't answered in time goes on in one of them."""

    def __init__(self, **options: Any) -> None:
        self._threads = ThreadPoolExecutor(32)
        super().__init__(timeout=0.5, **options)

    def ask(
        self,
        actors: Sequence[str],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        self.before.get(function.__name__, lambda: None)()
        deadline = time.monotonic() + timeout + 0.5
        calls = [
            self._threads.submit(self._call, actor, function, tuple(rest))
            for actor, (_, *rest) in zip(actors, args, strict=True)
        ]
        return [_answer(call, deadline - time.monotonic()) for call in calls]

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


def _answer(call: Future[Any], timeout: float) -> Any:
    try:
        return call.result(max(0.05, timeout))
    except TooLate:
        return CallFailure("it did not answer in time")
    except Exception as error:
        return CallFailure(str(error), type(error).__name__, error)


class Slow(EngineHooks):
    """Takes as long as the test wants in one callback of rollout 0; sees what it goes on with."""

    target: WeightTarget

    def __init__(self, callback: str) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.wrong: list[int | None] = []
        setattr(self, callback, self._wait)

    def _wait(self) -> None:
        assert self.go_on.wait(20)

    def continue_generation(self) -> None:
        staging, version = self.target._staging[self.target._live], self.target.version
        if not is_version(staging.views(self.target._layout), 0, version or 0):
            self.wrong.append(version)


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[Late, Slow]]]:
    """Controllers whose rollouts run version 1 and whose trainers hold 2."""
    made: list[tuple[Late, Slow]] = []

    def open_(callback: str = "pause_generation", **options: Any) -> tuple[Late, Slow]:
        slow = Slow(callback)
        sync = Late(hooks=lambda rank: slow if rank == 0 else EngineHooks(), **options)
        made.append((sync, slow))
        slow.target = sync.targets[0]
        sync.train(1)
        sync.push()
        sync.train(2)
        return sync, slow

    yield open_
    for sync, slow in made:
        slow.go_on.set()
        sync.close()


def read(target: WeightTarget) -> int | None:
    """The version that a reader meets, all of it (RS-1)."""
    with target.reading() as weights:
        version = target.version
        assert is_version(weights, target.rank, version or 0), f"RS-3: not version {version}"
    return version


def late_commit(sync: Late, slow: Slow) -> None:
    """Decides version 2, which rollout 0 still commits when this returns."""
    slow.go_on.clear()
    with pytest.raises(WeightSyncError, match="version 2 is in use, but not at rollout 0"):
        sync.push()
    sync.train(3)


@pytest.mark.usefixtures("other_trainers")
@pytest.mark.parametrize("by", ["same controller", "another controller"])
@pytest.mark.parametrize("kind", ["staged", "into"])
def test_rs_3_a_commit_that_ends_late_takes_no_byte_of_the_next_version(
    opened: Callable[..., tuple[Late, Slow]], kind: str, by: str
) -> None:
    sync, slow = opened(**({"into": [Module(), Module()].__getitem__} if kind == "into" else {}))
    late_commit(sync, slow)
    controller: WeightSync = sync
    if by == "another controller":
        controller = by_others(sync, timeout=0.5)
    version = 3 if controller is sync else 7

    def release() -> None:
        # All bytes of the next version have arrived, if rollout 0 lets them.
        slow.go_on.set()
        time.sleep(0.2)
        assert read(sync.targets[0]) == 2

    sync.before["target_confirm"] = release
    with suppress(WeightSyncError):
        controller.push(version)
    release()
    del sync.before["target_confirm"]
    assert controller.push(version).version == version
    assert [read(target) for target in sync.targets] == [version] * 2


def test_rs_3_an_engine_goes_on_with_no_byte_of_the_next_version(
    opened: Callable[..., tuple[Late, Slow]],
) -> None:
    sync, slow = opened("flush_cache", staged=False)
    late_commit(sync, slow)

    def release() -> None:
        slow.go_on.set()
        time.sleep(0.2)

    sync.before["target_confirm"] = release
    with suppress(WeightSyncError):
        sync.push()
    release()
    assert slow.wrong == [], "RS-3: it went on with bytes of a version that it hasn't"
    del sync.before["target_confirm"]
    assert sync.push(3).version == 3
    assert slow.wrong == []


def test_rs_3_a_confirm_that_ends_after_its_push_was_aborted_confirms_nothing(
    opened: Callable[..., tuple[Late, Slow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [Module(), Module()]
    sync, _ = opened(into=modules.__getitem__)
    target, go_on, ended = sync.targets[0], threading.Event(), threading.Event()
    check_ties = target._into.check_ties  # type: ignore[union-attr]

    def slowly(arrived: Any) -> None:
        assert go_on.wait(20)
        check_ties(arrived)
        ended.set()

    monkeypatch.setattr(target._into, "check_ties", slowly)
    with pytest.raises(WeightSyncError, match="rollout 0 did not confirm"):
        sync.push()
    go_on.set()
    assert ended.wait(20)
    sync._threads.shutdown()  # the call has returned
    with pytest.raises(WeightSyncError, match="expected None, the version that was confirmed"):
        target.commit(2)
    assert read(target) == 1


def test_a_call_that_waits_ends_when_a_later_one_comes(
    opened: Callable[..., tuple[Late, Slow]],
) -> None:
    sync, slow = opened()
    late_commit(sync, slow)
    target = sync.targets[0]
    assert sync._session is not None
    with ThreadPoolExecutor() as pool:
        aborts = []
        for _ in range(2):
            before = target.calls_lock.latest
            aborts.append(pool.submit(phases.target_abort, None, target.name, sync._session._id))
            while target.calls_lock.latest is before:
                time.sleep(1e-3)
        slow.go_on.set()
        with pytest.raises(Stale, match="another push was begun"):
            aborts[0].result(20)
        assert aborts[1].result(20).version == 2


def test_rs_1_weights_that_one_call_changes_are_changed_by_no_other() -> None:
    gate = ReaderGate(lambda: (), lambda: False)
    with gate.changing():
        with (
            pytest.raises(WeightSyncError, match="another call is changing the weights"),
            gate.changing(),
        ):
            pass
        assert gate._is_closed, "the first still changes them"
    with gate.changing():
        pass


def test_rs_3_a_confirm_that_an_abort_waits_for_does_not_end_the_abort(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = LocalSync(delta=True, timeout=20.0)
    request.addfinalizer(sync.close)
    for version in (1, 2):
        sync.train(version)
        sync.push()
    target, applying, go_on = sync.targets[0], threading.Event(), threading.Event()
    late: list[tuple[Any, ...]] = []
    call = sync._call

    def lose(who: str, function: Callable[..., Any], extra: tuple[Any, ...]) -> Any:
        if who == "rollout 0" and function in (phases.target_confirm, phases.target_abort):
            late.append(extra)
            raise ConnectionError("it did not answer")
        return call(who, function, extra)

    for tensor in sync.tensors[0].values():
        tensor.view(-1)[0] = 77
    monkeypatch.setattr(sync, "_call", lose)
    with pytest.raises(WeightSyncError):
        sync.push()
    confirm, abort, *_ = late
    apply = target._inbox.apply

    def slow(*args: Any) -> bool:
        applying.set()
        assert go_on.wait(20)
        return apply(*args)

    monkeypatch.setattr(target._inbox, "apply", slow)
    with ThreadPoolExecutor(2) as pool:
        confirmed = pool.submit(phases.target_confirm, None, "rollout 0", *confirm)
        assert applying.wait(20)
        before = target.calls_lock.latest
        aborted = pool.submit(phases.target_abort, None, "rollout 0", *abort)
        while target.calls_lock.latest is before:
            time.sleep(0.01)
        go_on.set()
        assert aborted.result(20).version == 2
        with suppress(Stale):
            confirmed.result(20)
    assert target._prepared is None


@pytest.mark.parametrize("staged", [True, False])
def test_rs_3_calls_of_a_push_that_was_aborted_change_nothing_when_they_come_late(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    sync = LocalSync(staged=staged, relay=True, engines=2, timeout=2.0)
    request.addfinalizer(sync.close)
    sync.train(1)
    sync.push()
    sync.train(2)
    target, call, made = sync.targets[0], sync._call, []

    def note(who: str, function: Callable[..., Any], extra: tuple[Any, ...]) -> Any:
        if function is phases.target_commit:
            raise AssertionError("it must not be decided")
        if who == "rollout 0" and function is not phases.target_abort:
            made.append((function, extra))
        if who == "rollout 1" and function is phases.target_confirm:
            raise ConnectionError("it did not answer")
        return call(who, function, extra)

    monkeypatch.setattr(sync, "_call", note)
    with pytest.raises(WeightSyncError, match="rollout 1 did not confirm"):
        sync.push()
    quiesce = phases.target_quiesce, (*made[0][1][:2], "commit", 600.0)
    late = {function.__name__: (function, extra) for function, extra in [*made, quiesce]}
    assert late.keys() >= {"target_pass_on", "target_confirm", "target_quiesce"}
    assert staged or "target_begin" in late

    monkeypatch.setattr(sync, "_call", call)

    def come_late() -> None:
        before = target._torn, target._relay
        for function, extra in late.values():
            with pytest.raises(Stale):
                function(None, "rollout 0", *extra)
        assert not target._gate._is_closed
        assert (target._torn, target._relay) == before

    come_late()
    sync.before["source_push"] = sync.before["target_confirm"] = come_late
    assert sync.push().version == 2
    assert list(sync.broken(set(), before=2)) == []


def overtaken(source: WeightSource, call: Callable[[], object]) -> None:
    """A call that waits for another when a third comes."""
    lock = source._calls_lock
    with ThreadPoolExecutor(1) as pool:
        with lock.between_calls():
            before = lock.latest
            waiting = pool.submit(call)
            while lock.latest is before:
                time.sleep(1e-3)
            lock.latest = object()
        with pytest.raises(Stale, match="another push was begun"):
            waiting.result(20)


def test_a_push_that_was_overtaken_takes_no_base_and_no_exchange_from_the_next(
    request: pytest.FixtureRequest,
) -> None:
    sync = World(delta=True, formats={"up": Fp8("tensor")})
    request.addfinalizer(sync.close)
    sync.train(1.0, 0)
    sync.push()
    assert sync._session is not None
    source, session = sync.sources[0], sync._session._id
    targets = list(sync._session._push_targets.values())
    overtaken(source, lambda: source.push(session, 2, targets, timeout=1.0))
    report = sync.push()
    # The scale of up is shorter than what describes its changes.
    assert report.nbytes < 0.02 * report.version_nbytes


@pytest.mark.parametrize("phase", ["source_convert", "source_accept"])
def test_a_connect_that_was_overtaken_takes_no_trainer_from_the_next(
    request: pytest.FixtureRequest, phase: str
) -> None:
    sync = World(formats={"up": Fp8((16, 16))} if phase == "source_convert" else None)
    request.addfinalizer(sync.close)
    asked: list[tuple[Any, ...]] = []
    call = sync._call

    def record(who: str, function: Callable[..., Any], extra: tuple[Any, ...]) -> Any:
        if function.__name__ == phase and who == sync.sources[0].name:
            asked.append(extra)
        return call(who, function, extra)

    sync._call = record  # type: ignore[method-assign]
    for _ in range(2):
        sync.connect()
    source, function = sync.sources[0], getattr(phases, phase)
    overtaken(source, lambda: function(None, source.name, *asked[0]))
    assert sync.push().version == 1
