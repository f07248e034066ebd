"""Rollouts that join and leave, and replicas that relay versions to each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import LocalContainer
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.relay import Relay, RelayWriter
from fabric_ray.weights.relay_groups import STRIPES, RelayGroups
from fabric_ray.weights.report import PushTarget
from fabric_ray.weights.stripes import containers_of, stripes
from tests.processes import within
from tests.unit.weights.local_sync import Fault, InProcess, LocalSync, expected, side


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=20))
def test_each_member_has_one_parent_and_few_parents_change_on_join_or_leave(
    count: int, changes: list[tuple[bool, int]]
) -> None:
    members = RelayGroups({7: list(range(count))})
    for comes, draw in changes:
        before = members.parents()
        if comes:
            members.join(100 + draw, 7) if 100 + draw not in before else None
        elif len(before) > 1:
            members.leave(sorted(before)[draw % len(before)])
        after = members.parents()
        assert members.heads == {7: next(m for m, parent in after.items() if parent is None)}
        for member in after:
            # Each member reaches the head along its parents.
            for _ in range(len(after)):
                member = after[member] if after[member] is not None else member
            assert member == members.heads[7]
        if abs(len(after) - len(before)) == 1 and _is_chain(before) == _is_chain(after):
            moved = {m for m in after.keys() & before.keys() if after[m] != before[m]}
            assert len(moved) <= 3
        assert all(len(children) <= 2 for children in members.children().values())


def _is_chain(parents: dict[int, int | None]) -> bool:
    return len(set(parents.values())) == len(parents)


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=50), st.integers(1, STRIPES))
def test_stripes_are_in_order_and_about_even(sizes: list[int], count: int) -> None:
    containers = [LocalContainer(i, f"c{i}", "uint8", (n,), (1,), n) for i, n in enumerate(sizes)]
    of = stripes(containers, len(sizes), count)
    assert of == sorted(of)
    assert 0 <= of[0] <= of[-1] < count
    for part in containers_of(containers, of, count):
        assert sum(c.nbytes for c in part) <= sum(sizes) / count + 2 * max(sizes)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("digest", [True, False])
def test_rs_3_bytes_sent_once_reach_every_replica(
    open_sync: Callable[..., LocalSync], staged: bool, digest: bool
) -> None:
    sync = open_sync(engines=3, relay=True, staged=staged, digest=digest)
    once = sum(t.nbytes for rank in range(2) for t in expected(rank, 1).values())
    for version in (2, 3, 4):
        sync.train(version)
        report = sync.push()
        assert report.nbytes == once, "each plan rank is written to once"
        assert {link.rollout for link in report.links} == {0, 1}
        assert list(sync.broken(set(), before=version)) == []


def test_a_stripe_is_relayed_before_the_next_arrives(
    open_engine: Callable[..., TransferEngine],
) -> None:
    trainer, parent, child = (open_engine(name, transport="shm") for name in ("t", "p", "c"))
    containers = [LocalContainer(i, f"c{i}", "uint8", (8,), (1,), 8) for i in range(2)]
    here, there = parent.alloc(16), child.alloc(16)
    counted, passed = [[e.counter() for _ in range(2)] for e in (parent, child)]
    push_target = PushTarget(
        rank=0,
        name="child",
        address=child.address.to_bytes(),
        region=there.descriptor().to_bytes(),
        counters=tuple(c.ref.to_bytes() for c in passed),
        offsets=(0, 8),
        staged=True,
        stripes=(0, 1),
    )
    to = RelayWriter(parent, containers, here, {0: 0, 1: 8}, push_target)
    relay = Relay([c.expect(1, timeout=10) for c in counted], [to], 10)
    source = trainer.alloc(16)
    source.tensor().fill_(7)
    at = trainer.import_region(here.descriptor())
    for stripe in range(2):
        part = slice(8 * stripe, 8 * stripe + 8)
        trainer.write(source[part], at[part], imm=counted[stripe].ref).wait()
        passed[stripe].wait(1, timeout=10)
        assert bytes(there.numpy()) == b"\7" * (8 * stripe + 8) + b"\0" * (8 - 8 * stripe)
    relay.wait()


# The last in the chain passes nothing on.
@pytest.mark.parametrize(
    ("stage", "who"),
    [("target_pass_on", f"rollout {number}") for number in (0, 2)]
    + [(s, f"rollout {n}") for s in ("target_confirm", "target_commit") for n in (0, 2, 4)],
)
def test_rs_3_a_replica_that_dies_while_relaying_is_named(
    open_sync: Callable[..., LocalSync], stage: str, who: str
) -> None:
    sync = open_sync(engines=3, relay=True)
    sync.fault = Fault(stage, who, "dies")
    with pytest.raises(WeightSyncError) as caught:
        sync.push()
    assert who in caught.value.failed
    assert list(sync.broken(set(caught.value.failed), before=1)) == []
    sync.fault = None
    sync.drop(int(who[-1]))
    sync.train(sync.version + 1)
    sync.push()
    assert list(sync.broken(set(), before=sync.version)) == []
    assert len(sync.rollouts) == 5


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("stage", ["source_push", "target_confirm", "target_commit"])
def test_rs_3_a_dead_rollout_is_dropped_by_name_and_the_others_continue(
    open_sync: Callable[..., LocalSync], stage: str, relay: bool
) -> None:
    sync = open_sync(engines=2, relay=relay, lost="drop", digest=True)
    sync.before[stage] = lambda: sync.kill("rollout 0") if "rollout 0" not in sync.dead else None
    report = sync.push()
    assert set(report.dropped) == {0}
    assert (report.version, sync.rollouts) == (2, (1, 2, 3))
    assert list(sync.broken(set(), before=2)) == []
    sync.train(3)
    assert sync.push().dropped == {}
    assert list(sync.broken(set(), before=3)) == []


@pytest.mark.parametrize("relay", [True, False])
def test_a_rollout_that_joins_has_the_version_in_use_at_once(
    open_sync: Callable[..., LocalSync], relay: bool
) -> None:
    sync = open_sync(engines=2, relay=relay, digest=True)
    plan = sync.plan
    # One more replica of a rank that is held, and one of a rank whose holder was dropped.
    sync.drop(2)
    for number, rank in ((4, 2), (5, 1)):
        report = sync.join(sync.another(rank))
        assert (report.rollout, report.version) == (number, 1)
        assert report.giver is not None
        assert sync.targets[report.giver].rank % 2 == rank % 2, "from one that holds the same"
        assert list(sync.broken(set(), before=1)) == []
    sync.push()
    assert sync.plan is plan, "patched, not made anew"
    assert sync.targets[4].version == sync.targets[5].version == 2
    assert list(sync.broken(set(), before=2)) == []
    sync.train(3)
    sync.connect()
    sync.push()
    assert list(sync.broken(set(), before=3)) == []


def test_a_rollout_without_a_replica_to_copy_from_gets_the_next_version(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    sync.drop(1)
    report = sync.join(sync.another(1))
    assert (report.version, report.giver) == (None, None)
    with pytest.raises(WeightSyncError, match="no version has arrived"):
        _ = sync.targets[2].weights
    sync.push()
    assert sync.targets[2].version == 2
    assert list(sync.broken(set(), before=2)) == []


def test_rs_1_a_version_of_another_controller_is_not_given_on(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    sync.drop(1)
    assert sync.join(sync.another(1)).giver is None
    # Another controller has brought it to a version of the same number.
    sync.targets[-1].version = 1
    sync._session._push_targets[2] = sync.targets[-1].abort()  # type: ignore[union-attr]
    assert sync.join(sync.another(1)).giver is None
    sync.push()
    assert sync.join(sync.another(1)).giver == 2, "it has this controller's version now"
    assert list(sync.broken(set(), before=2)) == []


@pytest.mark.parametrize("options", [{"digest": True}, {"delta": True}], ids=str)
def test_a_rollout_joins_a_replica_to_which_trainers_write_in_other_pieces(
    open_engine: Callable[..., TransferEngine], options: dict[str, bool]
) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(300, 1000), torch.nn.Linear(1000, 300)
        ).bfloat16()

    engines = [open_engine(transport="shm") for _ in range(5)]
    trained, replicas = model(), [model() for _ in range(3)]
    ends = [WeightSource(trained, rank=i, name=f"source {i}", engine=engines[i]) for i in range(2)]
    for i, replica in enumerate(replicas):
        ends.append(WeightTarget(into=replica, name=f"replica {i}", engine=engines[2 + i]))  # type: ignore[arg-type]
    with contextlib.ExitStack() as closing:
        for end in ends:
            closing.callback(end.close)
        sync = WeightSync(
            ["source 0", "source 1"], ["replica 0", "replica 1"], calls=InProcess(), **options
        )
        sync.push()
        pieces = [
            [(copy.dst_container, copy.dst_offset, copy.run) for copy in sync.plan.for_target(rank)]
            for rank in range(2)
        ]
        assert sorted(pieces[0]) != sorted(pieces[1])
        sync.drop(1)
        assert sync.join("replica 2").giver == 0
        for parameter, wanted in zip(replicas[2].parameters(), trained.parameters(), strict=True):
            assert torch.equal(parameter, wanted)


def test_rs_3_a_failed_push_names_the_rollouts_that_are_at_an_older_version(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    sync.fault = Fault("target_commit", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError, match="rollout 1"):
        sync.push()
    sync.fault = Fault("source_push", "trainer 0", "is not asked")
    with pytest.raises(WeightSyncError, match="all live rollouts stay at 2, rollout 1 at 1: "):
        sync.push()


@pytest.mark.parametrize("stage", ["target_accept", "target_give", "target_confirm"])
def test_a_join_that_fails_leaves_nothing_behind(
    open_sync: Callable[..., LocalSync], stage: str
) -> None:
    sync = open_sync()
    who = sync.another(0)
    sync.fault = Fault(stage, "rollout 0" if stage == "target_give" else who, "is not asked")
    with pytest.raises(WeightSyncError, match="rollout"):
        sync.join(who)
    sync.fault = None
    assert sync.rollouts == (0, 1)
    sync.push()
    assert list(sync.broken(set(), before=2)) == []
    assert sync.join(who).rollout == 2, "it may try again"
    assert list(sync.broken(set(), before=2)) == []


def test_where_one_cannot_give_its_version_another_does(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=3)
    sync.kill("rollout 0")
    report = sync.join(sync.another(0))
    assert (report.giver, report.version) == (2, 1)
    assert list(sync.broken(set(), before=1)) == []


@pytest.mark.parametrize("staged", [True, False])
def test_a_dropped_rollout_may_join_again(
    open_sync: Callable[..., LocalSync], staged: bool
) -> None:
    sync = open_sync(engines=2, staged=staged, relay=True)
    sync.drop(3)
    for version in (1, 2):
        number = sync.join("rollout 3").rollout
        sync.targets += [sync.targets[3]] * (number + 1 - len(sync.targets))
        assert sync.targets[3].version == version
        assert list(sync.broken(set(), before=version)) == []
        sync.push()
        sync.drop(number)
        if version == 1:
            sync.train(2)


def test_an_overwritten_version_is_not_copied(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2, staged=False)
    sync.fault = Fault("source_push", "trainer 0", "is not heard")
    with pytest.raises(WeightSyncError):
        sync.push()
    sync.fault = None
    assert sync.join(sync.another(0)).giver is None
    sync.push()
    assert list(sync.broken(set(), before=2)) == []
    with pytest.raises(WeightSyncError, match="version 2 is in use"):
        sync.targets[0].give(sync._session._push_targets[2], 1)  # type: ignore[union-attr]


def test_a_rollout_with_a_later_version_does_not_join_and_changes_nothing(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2)
    late = sync.another(0)
    sync.join(late)
    sync.drop(4)
    # Another controller has pushed to it since.
    sync.targets[-1].version = 7
    with pytest.raises(WeightSyncError, match="runs version 7, expected at most 1"):
        sync.join(late)
    assert sync.push().version == 2


def test_a_member_does_not_join_again(open_sync: Callable[..., LocalSync]) -> None:
    sync = open_sync(engines=2)
    with pytest.raises(InvalidArgument, match="has joined already"):
        sync.join("rollout 0")
    sync.push()
    assert list(sync.broken(set(), before=2)) == []


def test_a_new_rollout_is_not_mistaken_for_a_dead_one(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2, lost="drop")
    sync.dead.add("unknown")
    with pytest.raises(WeightSyncError, match="rollout 4"):
        sync.join("unknown")
    assert sync.join(sync.another(0)).rollout == 4
    report = sync.push()
    assert report.dropped == {}
    assert list(sync.broken(set(), before=2)) == []


def test_rs_4_a_death_in_a_chain_ends_the_wait_of_all_behind_it(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=5, relay=True, timeout=30)
    halted = threading.Event()
    # It takes in all of it and passes nothing on.
    sync.targets[2].pass_on = lambda *_, **__: None  # type: ignore[method-assign]

    def die() -> None:
        if not halted.is_set():
            halted.set()
            threading.Timer(0.2, sync.kill, ["rollout 2"]).start()

    sync.before["target_confirm"] = die
    start = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sync.push()
    assert time.monotonic() - start < 10, "RS-4: no call waits for the timeout"
    assert "rollout 8" in caught.value.failed


def test_one_push_is_one_version_even_if_a_rollout_dies(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2, lost="drop")
    sync.fault = Fault("target_commit", "rollout 0", "dies")

    def fail(_: int) -> None:
        raise OSError("no room")

    sync.targets[1].on_commit(fail)
    with pytest.raises(WeightSyncError, match="hook failed at rollout 1") as caught:
        sync.push(2)
    assert set(caught.value.failed) == {"rollout 0", "rollout 1"}
    assert (sync.version, sync.rollouts) == (2, (1, 2, 3))
    assert list(sync.broken(set(), before=2)) == []


def test_a_push_without_live_rollouts_is_an_error(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(lost="drop")
    sync.before["target_commit"] = lambda: [sync.kill(f"rollout {i}") for i in range(2)]
    with pytest.raises(WeightSyncError, match="is in use, but not at rollout 0 and rollout 1"):
        sync.push()


def test_a_rollout_dropped_before_the_first_push_is_not_required() -> None:
    sync = LocalSync(engines=2, lost="drop")
    try:
        sync.drop(3)
        sync.kill("rollout 2")
        sync.train(1)
        assert set(sync.push().dropped) == {2}
        sync.train(2)
        # Ranks 2 and 3 still have no rollout.
        sync.connect()
        sync.push()
        assert list(sync.broken(set(), before=2)) == []
    finally:
        sync.close()


def test_an_abort_passes_nothing_on_any_more(open_engine: Callable[..., TransferEngine]) -> None:
    parent, child = (open_engine(name, transport="shm") for name in ("p", "c"))
    containers = [LocalContainer(0, "c0", "uint8", (8,), (1,), 8)]
    here, there, counted, passed = (
        parent.alloc(8),
        child.alloc(8),
        parent.counter(),
        child.counter(),
    )
    push_target = PushTarget(
        rank=0,
        name="child",
        address=child.address.to_bytes(),
        region=there.descriptor().to_bytes(),
        counters=(passed.ref.to_bytes(),),
        offsets=(0,),
        staged=True,
        stripes=(0,),
    )
    arrival = counted.expect(1, timeout=10)
    relay = Relay([arrival], [RelayWriter(parent, containers, here, {0: 0}, push_target)], 10)
    relay.cancel()
    # What was on its way to the callback when the abort came.
    relay._submit(relay._children[0], 0)
    assert relay._in_flight == []
    assert passed.value == 0


@pytest.mark.long
def test_a_replica_that_the_version_did_not_reach_is_named(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2, relay=True)
    sync.before["source_push"] = lambda: sync.targets[2]._staging[1].revoke()
    with pytest.raises(WeightSyncError, match="relay failed: rollout 2"):
        sync.push()
    assert sync.version == 1


def test_only_what_fits_may_join_and_the_last_may_not_be_dropped(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    who = sync.another(0)
    sync.targets[2].side = side(2)
    with pytest.raises(InvalidArgument, match="its side differs"):
        sync.join(who)
    with pytest.raises(InvalidArgument, match=r"got 2, expected one of \(0, 1\)"):
        sync.drop(2)
    sync.drop(1)
    with pytest.raises(InvalidArgument, match="is the last"):
        sync.drop(0)
    with pytest.raises(InvalidArgument, match="expected 'raise' or 'drop'"):
        LocalSync(lost="ignore")


def test_rs_3_bytes_that_change_on_their_way_between_replicas_are_no_version(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync(engines=2, relay=True, digest=True)

    def change() -> None:
        counters = sync.targets[2]._counters
        within(5, "all of it", lambda: sum(c.value for c in counters) == len(expected(0, 2)))
        sync.arriving(2)["norm"].fill_(-1)

    sync.before["target_confirm"] = change
    with pytest.raises(WeightSyncError, match="is corrupt") as caught:
        sync.push()
    assert set(caught.value.failed) == {"rollout 2"}
    assert list(sync.broken({"rollout 2"}, before=1)) == []
