"""Weight pushes while other threads make every call of the controller, its sources and targets."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch

from fabric_ray.errors import FabricError, InvalidArgument, Stale, WeightSyncError
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.target import TARGETS
from tests.at_once import at_once, unused
from tests.unit.weights.local_sync import LocalSync, expected

ROUNDS = 4


@dataclass
class World:
    """What all threads use."""

    sync: LocalSync
    training: threading.Lock = field(default_factory=threading.Lock)
    """A version is trained and pushed before the next is trained."""
    committed: list[int] = field(default_factory=list)
    joins: int = 0


def push(w: World, draw: random.Random) -> None:
    with w.training:
        before = w.sync.version
        w.sync.train(before + 1)
        named: set[str] = set()
        try:
            w.sync.push()
        except WeightSyncError as error:
            # A concurrent call made it fail with an error; no target uses a part of it (RS-3).
            named = set(error.failed)
        assert w.sync.version == (before if named else before + 1)
        assert list(w.sync.broken(named, before)) == []


def read(w: World, draw: random.Random) -> None:
    """Weights that were read before a second push began are all of one version (RS-3)."""
    target = draw.choice(w.sync.targets[:2])
    before = target.version
    got = {name: tensor.clone() for name, tensor in target.weights.items()}
    if before is None or target.version != before:
        return
    fits = [
        all(torch.equal(got[name], want) for name, want in expected(target.rank, version).items())
        for version in (before, before + 1)
    ]
    assert any(fits), f"RS-3: {target.name} has neither {before} nor {before + 1}"


def read_inside(w: World, draw: random.Random) -> None:
    """All that is read in one block is of one version (RS-1)."""
    target = draw.choice(w.sync.targets[:2])
    try:
        with target.reading() as weights:
            want = expected(target.rank, target.version or 0)
            assert all(torch.equal(weights[name], want[name]) for name in want)
    except WeightSyncError as error:
        if "no version has arrived" not in str(error):  # while a controller connects
            raise


def look(w: World, draw: random.Random) -> None:
    assert w.sync.rollouts[:2] == (0, 1)
    with suppress(InvalidArgument):  # there is no plan while it connects
        assert "w" in w.sync.explain("w")
        assert w.sync.plan.copy_count
    for source in w.sync.sources:
        rank, _, address = source.meta()
        assert (source.rank, bool(address)) == (rank, True)
        assert source.temporary is None
        source.release()


def connect(w: World, draw: random.Random) -> None:
    with w.training:
        w.sync.connect()


def join_and_drop(w: World, draw: random.Random) -> None:
    with w.training:
        if w.joins == 3:
            return
        w.joins += 1
        number = w.sync.join(w.sync.another(draw.randrange(2))).rollout
        w.sync.drop(number)
    with pytest.raises(InvalidArgument, match="rollout can't be dropped"):
        w.sync.drop(number)


def call_for_another_session(w: World, draw: random.Random) -> None:
    """What a controller says that was replaced: refused, whatever goes on."""
    source, target = draw.choice(w.sync.sources), draw.choice(w.sync.targets[:2])
    with pytest.raises(Stale):
        target.check_current("of another")
    with pytest.raises(Stale):
        source.push("of another", 1 << 40, [])
    with pytest.raises(Stale):
        source.join("of another", {})


def commit_what_was_not_confirmed(w: World, draw: random.Random) -> None:
    target = draw.choice(w.sync.targets[:2])
    target.on_commit(w.committed.append)
    for version in (0, 1 << 40):
        with pytest.raises(WeightSyncError):
            target.commit(version)
    assert target.address()


CALLS = [
    push,
    read,
    read_inside,
    look,
    connect,
    join_and_drop,
    call_for_another_session,
    commit_what_was_not_confirmed,
]
# Stages of a push, which the controller asks for one by one: pushes, connects and joins make them.
STAGES = {
    "WeightSource.accept",
    "WeightSource.ready",
    "WeightTarget.abort",
    "WeightTarget.accept",
    "WeightTarget.begin",
    "WeightTarget.confirm",
    "WeightTarget.set_inbound",
    "WeightTarget.give",
    "WeightTarget.pass_on",
    "WeightTarget.quiesce",
}
# With formats alone; and what ends what all others use.
APART = {
    "WeightSource.close",
    "WeightSource.convert",
    "WeightSync.push_async",
    "WeightTarget.close",
}


def test_every_public_call_of_a_push_is_made() -> None:
    assert unused(__file__, WeightSync, WeightSource, WeightTarget) <= STAGES | APART


@pytest.fixture
def sync() -> Iterator[LocalSync]:
    sync = LocalSync(timeout=60.0)
    sync.train(1)
    sync.push()
    yield sync
    sync.close()


def test_rs_3_pushes_while_32_threads_call_everything_else(sync: LocalSync) -> None:
    world = World(sync)

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            for call in draw.sample(CALLS, len(CALLS)):
                call(world, draw)

    at_once(work)
    before = sync.version
    assert before > 1, "no push came through"
    sync.train(before + 1)
    sync.push()
    assert sync.version == before + 1
    assert list(sync.broken(set(), before)) == []
    assert world.committed[-1] == sync.version
    assert world.committed == sorted(world.committed)


def test_sources_and_targets_that_come_and_go_in_32_threads_are_found_by_their_names(
    sync: LocalSync,
) -> None:
    engine, side = sync.engines["trainer 0"], sync._side

    def work(number: int) -> None:
        name = f"model {number}"
        for _ in range(ROUNDS):
            source = WeightSource(sync.tensors[0], rank=0, name=name, engine=engine)
            target = WeightTarget(side, rank=number % 2, name=name, engine=engine)
            assert TARGETS.get(name) is target
            with pytest.raises(WeightSyncError, match="no version"):
                _ = target.weights
            with suppress(FabricError):
                target.abort()
            source.close()
            target.close()
            with pytest.raises(FabricError, match=name):
                TARGETS.get(name)

    at_once(work)
