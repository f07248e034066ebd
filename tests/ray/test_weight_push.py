"""Weight pushes between actors on several raylets: versions move everywhere or nowhere (RS-3)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import (
    Container,
    DType,
    DtypeMismatch,
    ExtraTensors,
    Leaf,
    Mesh,
    MissingTensors,
    PlanError,
    ShapeMismatch,
    Shard,
    Side,
    Tensor,
)
from fabric_ray.weights import WeightSync, phases
from tests.ray.actors import BF16, SHAPES, expected, side, start, stop, values


def train(trainers: list[Any], version: int) -> None:
    ray.get([t.train.remote(version) for t in trainers])


def check(rollouts: list[Any], version: int) -> None:
    for rank, actor in enumerate(rollouts):
        found = ray.get(actor.weights.remote())
        want = expected(rank, len(rollouts), version)
        assert found.keys() >= want.keys()
        for name, tensor in want.items():
            assert torch.equal(found[name], tensor), (rank, name, version)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("staged", [True, False])
def test_rs_3_every_version_arrives_whole(cluster: list[str], transport: str, staged: bool) -> None:
    trainers, rollouts = start(cluster, staged=staged, transport=transport)
    try:
        sync = WeightSync(trainers, rollouts, digest=True)
        connected = sync.connect()
        for version in (1, 2, 5):
            train(trainers, version)
            report = sync.push(version)
            check(rollouts, version)
            assert report.version == sync.version == version
            assert report.nbytes == connected.nbytes
            assert {link.transport for link in report.links} == {transport}
        assert ray.get(rollouts[0].state.remote()) == (5, [1, 2, 5])
        # q, k and the norm, each byte over a link once for every rollout that holds it.
        whole = {name: values(name, 0).nbytes for name in SHAPES}
        assert connected.nbytes == whole["q"] + whole["k"] + 2 * whole["norm"]
        assert "norm" in sync.explain("norm")
    finally:
        stop(trainers, rollouts)


async def test_a_push_can_be_awaited(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster, rollouts=1)
    try:
        sync = WeightSync(trainers, rollouts)
        train(trainers, 1)
        assert (await sync.push_async()).version == 1
        check(rollouts, 1)
    finally:
        stop(trainers, rollouts)


def test_rs_1_weights_that_have_not_arrived_cannot_be_used(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster, rollouts=1)
    try:
        with pytest.raises(WeightSyncError, match="no version has arrived"):
            ray.get(rollouts[0].weights.remote())
        sync = WeightSync(trainers, rollouts)
        sync.push(3)
        for version in (3, 2):
            with pytest.raises(InvalidArgument, match="expected more than 3"):
                sync.push(version)
    finally:
        stop(trainers, rollouts)


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.long), "tcp"])
def test_rs_3_a_dead_rollout_is_named_and_no_rollout_advances(
    cluster: list[str], transport: str
) -> None:
    trainers, rollouts = start(cluster, rollouts=3, transport=transport)
    try:
        sync = WeightSync(trainers, rollouts, timeout=10)
        train(trainers, 1)
        sync.push()
        train(trainers, 2)
        os.kill(ray.get(rollouts[1].pid.remote()), signal.SIGKILL)
        start_time = time.monotonic()
        for _ in range(2):
            with pytest.raises(WeightSyncError, match="rollout 1") as caught:
                sync.push()
            assert set(caught.value.failed) == {"rollout 1"}
            assert sync.version == 1
        assert time.monotonic() - start_time < 30
        for rank in (0, 2):
            assert ray.get(rollouts[rank].state.remote()) == (1, [1])
            found = ray.get(rollouts[rank].weights.remote())
            assert torch.equal(found["qk"], expected(rank, 3, 1)["qk"])
    finally:
        stop(trainers, rollouts)


@pytest.mark.long
def test_rs_3_a_kill_at_any_moment_leaves_one_version(cluster: list[str]) -> None:
    """After any death, live rollouts hold one version, and the push names the dead actor."""
    chance = random.Random(7)
    for victim in ("trainer", "rollout", "trainer"):
        big = 8 << 20
        trainers, rollouts = start(cluster, rollouts=2, target=_with_big(big), big=big)
        try:
            sync = WeightSync(trainers, rollouts, timeout=20)
            train(trainers, 1)
            first = sync.push()
            train(trainers, 2)
            group = trainers if victim == "trainer" else rollouts
            pid = ray.get(group[1].pid.remote())
            delay = chance.uniform(0, 1.5 * first.seconds)
            killer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
            killer.start()
            try:
                sync.push()
                named = None
            except WeightSyncError as error:
                named = error.failed
            killer.join()
            assert named is None or f"{victim} 1" in named
            reached = sync.version
            found = ray.get(rollouts[0].weights.remote(), timeout=30)
            assert torch.equal(found["qk"], expected(0, 2, reached)["qk"]), delay
            assert (found["big"] == reached).all()
        finally:
            stop(trainers, rollouts)


@pytest.mark.long
def test_rs_3_a_rollout_that_hangs_is_named_and_catches_up_later(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster, rollouts=2)
    try:
        sync = WeightSync(trainers, rollouts, timeout=6)
        train(trainers, 1)
        sync.push()
        train(trainers, 2)
        pid = ray.get(rollouts[1].pid.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WeightSyncError, match="rollout 1"):
                sync.push()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert sync.version == 1
        # Its engine was given up by its peers; connecting again brings it back.
        sync.connect()
        sync.push()
        check(rollouts, 2)
    finally:
        stop(trainers, rollouts)


def test_parameters_may_move_but_not_change(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster, rollouts=1)
    try:
        sync = WeightSync(trainers, rollouts)
        sync.push()
        ray.get([t.replace.remote("norm", values("norm", 1)) for t in trainers])
        ray.get(trainers[0].replace.remote("q", values("q", 1)))
        ray.get(trainers[1].replace.remote("k", values("k", 1)))
        sync.push()
        check(rollouts, 1)
        ray.get(trainers[0].replace.remote("q", torch.zeros(3, dtype=torch.bfloat16)))
        with pytest.raises(WeightSyncError, match=r"trainer 0.*`q` differs.*\[64, 96\].*connect"):
            sync.push()
        assert sync.version == 2
        ray.get(trainers[0].replace.remote("q", values("q", 3)))
        sync.push()
    finally:
        stop(trainers, rollouts)


def _with_big(elements: int) -> Side:
    big = Leaf(Tensor("big", (elements,), BF16), Mesh.line(range(2)), (Shard(0),))
    return Side.of(2, [*side(2).containers, Container("big", BF16, big)])


def _one(name: str, shape: tuple[int, ...], dtype: DType = BF16) -> Side:
    leaf = Leaf(Tensor(name, shape, dtype), Mesh.line(range(1)), (Shard(0),))
    return Side.of(1, [Container(name, dtype, leaf)])


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (_one("absent", (4,)), MissingTensors, "absent"),
        (_one("q", (64, 97)), ShapeMismatch, "q"),
        (_one("q", (64, 96), DType.of("int16")), DtypeMismatch, "q"),
        (_one("q", (64, 96)), ExtraTensors, "norm"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_anything_moves(
    cluster: list[str], target: Side, error: type[PlanError], text: str
) -> None:
    trainers, rollouts = start(cluster, rollouts=1, target=target)
    try:
        with pytest.raises(error, match=text):
            WeightSync(trainers, rollouts).connect()
        with pytest.raises(InvalidArgument, match="order of ranks"):
            WeightSync(trainers[::-1], rollouts).connect()
    finally:
        stop(trainers, rollouts)


def test_pushes_leak_nothing(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster)
    try:
        sync = WeightSync(trainers, rollouts)
        for _ in range(3):
            sync.push()
        before = ray.get([t.belongings.remote() for t in trainers])
        for _ in range(24):
            sync.push()
        after = ray.get([t.belongings.remote() for t in trainers])
        for (descriptors, threads), (more, ours) in zip(before, after, strict=True):
            assert ours == threads
            assert more < descriptors + 12, "Ray has some of its own, which come and go"
    finally:
        stop(trainers, rollouts)


def test_pushes_from_several_threads_take_turns(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster)
    try:
        sync = WeightSync(trainers, rollouts)
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda _: sync.push(), range(8)))
        assert sorted(report.version for report in reports) == list(range(1, 9))
        assert ray.get(rollouts[0].state.remote()) == (8, list(range(1, 9)))
    finally:
        stop(trainers, rollouts)


def test_rs_3_an_interrupted_push_never_writes_to_weights_in_use(
    cluster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, rollouts = start(cluster)
    try:
        sync = WeightSync(trainers, rollouts)
        train(trainers, 1)
        sync.push()
        train(trainers, 2)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        session, ask = sync._session, sync._rollouts.call
        assert session is not None

        def commit_and_interrupt(function: Any, args: Any) -> Any:
            answers = ask(function, args)
            return interrupt() if function is phases.target_commit else answers

        # Right after all have committed, before the controller has noted where to write next.
        monkeypatch.setattr(sync._rollouts, "call", commit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
        monkeypatch.undo()
        train(trainers, 3)
        # This one ends before its commit: what is in use stays whole.
        monkeypatch.setattr(session, "_merge_digests", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
        monkeypatch.undo()
        check(rollouts, 2)
        sync.push()
        check(rollouts, 3)
    finally:
        stop(trainers, rollouts)


def test_only_the_latest_controller_pushes_and_versions_never_run_backwards(
    cluster: list[str],
) -> None:
    trainers, rollouts = start(cluster)
    try:
        old = WeightSync(trainers, rollouts)
        train(trainers, 5)
        old.push(5)
        new = WeightSync(trainers, rollouts)
        train(trainers, 6)
        assert new.push().version == 6
        train(trainers, 7)
        with pytest.raises(WeightSyncError, match="another WeightSync has connected"):
            old.push()
        check(rollouts, 6)
        assert new.push().version == 7
        check(rollouts, 7)
        # The latest controller to connect wins.
        old.connect()
        assert old.version == 7
        train(trainers, 8)
        assert old.push().version == 8
        check(rollouts, 8)
    finally:
        stop(trainers, rollouts)


@pytest.mark.long
def test_mr_1_a_trainer_that_wakes_up_late_writes_to_nothing_in_use(cluster: list[str]) -> None:
    big = 64 << 20
    trainers, rollouts = start(cluster, target=_with_big(big), big=big)
    spare, no_rollouts = start(cluster, rollouts=0, big=big)
    pid = ray.get(trainers[0].pid.remote())
    try:
        sync = WeightSync(trainers, rollouts, timeout=4)
        seconds = 0.0
        for version in (1, 2, 3):
            train(trainers, version)
            seconds = sync.push().seconds
        train(trainers, 4)
        stopper = threading.Timer(seconds * 0.4, os.kill, (pid, signal.SIGSTOP))
        stopper.start()
        # It may have been done by then; the rest must hold all the same.
        with contextlib.suppress(WeightSyncError):
            sync.push()
        stopper.join()
        heirs = [spare[0], trainers[1]]
        successor = WeightSync(heirs, rollouts, timeout=20)
        for version in (5, 6):
            train(heirs, version)
            successor.push(version)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        check(rollouts, 6)
        for actor in rollouts:
            assert (ray.get(actor.weights.remote())["big"] == 6).all()
    finally:
        os.kill(pid, signal.SIGCONT)
        stop(trainers, rollouts, spare, no_rollouts)


def test_a_freed_parameter_and_a_failing_hook_are_named(cluster: list[str]) -> None:
    trainers, rollouts = start(cluster, rollouts=1)
    try:
        sync = WeightSync(trainers, rollouts)
        sync.connect()
        ray.get(rollouts[0].break_hook.remote())
        with pytest.raises(WeightSyncError, match="in use everywhere, but a hook failed"):
            sync.push()
        assert ray.get(rollouts[0].state.remote()) == (1, [1])
        ray.get(trainers[0].replace.remote("q", values("q", 1)))
        ray.get(trainers[0].free.remote("q"))
        with pytest.raises(WeightSyncError, match=r"`q`: its memory was freed"):
            sync.push()
        assert sync.version == 1
    finally:
        stop(trainers, rollouts)
