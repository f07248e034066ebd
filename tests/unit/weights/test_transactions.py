"""RS-3: a rollout is at version v or v+1, never mixed, whatever step of a push goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.weights.report import Sent
from fabric_ray.weights.step_sender import StepSender
from tests.chaos.faults import reset_sockets
from tests.unit.weights.local_sync import Fault, LocalSync, is_version, values

STEPS = {
    "target_begin": "rollout",
    "source_push": "trainer",
    "target_confirm": "rollout",
    "target_commit": "rollout",
}
CASES = [
    pytest.param(stage, f"{role} {rank}", staged, id=f"{stage}-{rank}-{staged=}")
    for stage, role in STEPS.items()
    for rank in range(2)
    for staged in (True, False)
    # Only in place a push has to be announced.
    if not (staged and stage == "target_begin")
]


@pytest.mark.parametrize("how", ["is not asked", "is not heard", "dies"])
@pytest.mark.parametrize(("stage", "who", "staged"), CASES)
def test_rs_3_after_any_failed_phase_every_rollout_is_at_one_version_or_is_named(
    open_sync: Callable[..., LocalSync], stage: str, who: str, staged: bool, how: str
) -> None:
    # A commit that is not answered is asked again for as long as three timeouts.
    sync = open_sync(staged=staged, timeout=2.0 if stage == "target_commit" else 5.0)
    sync.fault = Fault(stage, who, how)
    with pytest.raises(WeightSyncError) as caught:
        sync.push()
    named = set(caught.value.failed)
    assert who in named, "RS-3: who failed is named"
    decided = stage == "target_commit"
    assert sync.version == (2 if decided else 1), (
        "RS-3: a version is decided once all rollouts have confirmed"
    )
    assert list(sync.broken(named, before=1)) == []
    if sync.dead:
        return
    sync.fault = None
    sync.train(3)
    assert sync.push(3).version == 3
    assert list(sync.broken(set(), before=3)) == []


def test_rs_3_bytes_that_did_not_come_are_no_version(
    open_sync: Callable[..., LocalSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = open_sync(timeout=0.2)
    nothing = Sent(spans=(), links=(), failed={}, digests={})
    monkeypatch.setattr(sync.sources[0], "push", lambda *_, **__: nothing)
    with pytest.raises(WeightSyncError) as caught:
        sync.push()
    assert list(sync.broken(set(caught.value.failed), before=1)) == []
    assert sync.version == 1, "RS-3: only what every rollout has confirmed is a version"


def test_rs_1_a_layout_for_which_there_is_no_memory_leaves_the_version_in_use_as_it_was(
    open_sync: Callable[..., LocalSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_sync().targets[1]
    first, second = target._layout
    other = tuple(
        msgspec.structs.replace(container, index=index)
        for container, index in ((second, first.index), (first, second.index))
    )
    share = msgspec.structs.replace(target._share, session="another", containers=other)

    def allocate(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("fabric_ray.weights.target.StagingMemory", allocate)
        with pytest.raises(MemoryError):
            target.accept(share)
    with target.reading() as weights:
        assert is_version(weights, 1, 1)
    target.accept(share)
    assert target.version is None
    ends = {c.index: target._staging[0].offsets[c.index] + c.nbytes for c in other}
    assert ends[first.index] <= target._staging[0].offsets[second.index]


def test_an_abort_that_fails_admits_readers(
    open_sync: Callable[..., LocalSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = open_sync(timeout=30.0)
    target = sync.targets[0]
    target.quiesce("commit", 600.0)

    def refuse(_: object) -> None:
        raise OSError("no memory can be pinned")

    with monkeypatch.context() as patched:
        patched.setattr(type(target), "_revoke", refuse)
        with pytest.raises(OSError, match="pinned"):
            target.abort()
    with target.reading() as weights:
        assert is_version(weights, 0, 1)


def test_rs_3_changed_bytes_are_not_committed(open_sync: Callable[..., LocalSync]) -> None:
    sync = open_sync(digest=True)
    sync.before["target_confirm"] = lambda: sync.arriving(1)["norm"].fill_(-1)
    with pytest.raises(WeightSyncError, match="is corrupt") as caught:
        sync.push()
    assert set(caught.value.failed) == {"rollout 1"}
    assert list(sync.broken({"rollout 1"}, before=1)) == []


@pytest.fixture
def while_sending(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens before each batch that a trainer sends."""
    actions: list[Callable[[], object]] = []
    send = StepSender.send

    def act_and_send(*args: Any) -> None:
        for action in actions:
            action()
        send(*args)

    monkeypatch.setattr(StepSender, "send", act_and_send)
    return actions


def test_rs_1_a_tensor_that_is_trained_while_a_push_reads_it_is_named(
    open_sync: Callable[..., LocalSync], while_sending: list[Callable[[], object]]
) -> None:
    sync = open_sync()
    while_sending.append(lambda: sync.tensors[0]["w"].add_(1))
    with pytest.raises(WeightSyncError, match="parameter `w` was changed while") as caught:
        sync.push()
    assert set(caught.value.failed) == {"trainer 0"}
    assert list(sync.broken(set(), before=1)) == []
    while_sending.clear()
    sync.train(3)
    assert sync.push(3).version == 3
    assert list(sync.broken(set(), before=3)) == []


def test_a_snapshot_may_be_written_beside_the_one_that_is_pushed(
    open_sync: Callable[..., LocalSync], while_sending: list[Callable[[], object]]
) -> None:
    sync = open_sync()
    snapshots = torch.stack([values("norm", 2), values("norm", 2)])
    for tensors in sync.tensors:
        tensors["norm"] = snapshots[0]
    while_sending.append(lambda: snapshots[1].add_(1))
    assert sync.push().version == 2
    assert list(sync.broken(set(), before=2)) == []


def test_rs_3_what_was_not_confirmed_cannot_be_put_into_use(
    open_sync: Callable[..., LocalSync],
) -> None:
    target = open_sync().targets[0]
    with pytest.raises(WeightSyncError, match="expected None"):
        target.commit(2)
    with pytest.raises(WeightSyncError, match="expected more than 1"):
        target.commit(1)
    assert target.version == 1


def test_a_rank_without_a_rollout_fails_before_planning(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    del sync._rollouts.actors[1]
    with pytest.raises(InvalidArgument, match=r"ranks \(0, 1\), but WeightSync got 1 rollouts;"):
        sync.connect()


def test_connections_that_end_between_two_pushes_fail_no_version(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    broken = 0
    while reset_sockets(os.getpid(), 0, "shm"):
        broken += 1
    assert broken
    time.sleep(0.2)  # long enough for all to hear of it
    sync.push()
    assert [target.version for target in sync.targets] == [2, 2]


def test_rs_3_in_place_a_push_that_failed_before_any_write_leaves_the_version_whole(
    open_sync: Callable[..., LocalSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = open_sync(staged=False)
    call = sync._call

    def lose(who: str, function: Callable[..., Any], extra: tuple[Any, ...]) -> Any:
        answer = call(who, function, extra)
        if who == "rollout 0" and function.__name__ == "target_abort":
            raise ConnectionError("it did not answer")
        return answer

    monkeypatch.setattr(sync, "_call", lose)
    sync.fault = Fault("target_begin", "rollout 1", "is not asked")
    for _ in range(2):  # the second asks for the push target that the first has not heard of
        with pytest.raises(WeightSyncError):
            sync.push()
        assert all(is_version(target.weights, target.rank, 1) for target in sync.targets)


def test_a_route_that_not_all_have_taken_is_given_again_even_if_it_is_the_earlier_one(
    open_sync: Callable[..., LocalSync],
) -> None:
    # Rollout 4 is relayed to by rollout 0 once there are 15 replicas, by 2 before and after.
    sync = open_sync(engines=16, relay=True, timeout=2.0)
    sync.drop(6)
    sync.fault = Fault("target_set_inbound", "rollout 8", "is not asked")
    with pytest.raises(WeightSyncError, match="rollout 8 did not take its inbound plan"):
        sync.push()
    sync.fault = None
    sync.drop(8)
    assert sync.push().version == 2
    assert list(sync.broken(set(), before=2)) == []
