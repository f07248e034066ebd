"""Trainers of miles push to SGLang's workers by the calls of miles' point-to-point updater."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights.reference import expected_containers
from tests.ray.actors import _take, stop
from tests.ray.miles_actors import CONFIG, TP, Engine, Trainer, trained
from tests.unit.families.pushes import assert_same

pytestmark = pytest.mark.long

BEFORE = ["pause_generation retract", "flush_cache"]


def after(version: int) -> list[str]:
    return [f"update_weight_version {version}", "pack", "continue_generation"]


class Team:
    """Two trainers, one of them in this process, and two engines of two workers."""

    def __init__(self, node: str, store: str) -> None:
        self.engines = [ray.remote(Engine).options(num_cpus=0).remote() for _ in range(2)]
        self.other = _take(node)
        joined = self.other.__ray_call__.remote(Trainer.join_as, 1, store)
        self.trainer = Trainer(0, store)
        ray.get(joined)
        self.connect()

    def connect(self) -> None:
        connected = self.other.__ray_call__.remote(Trainer.connect_as, self.engines)
        self.trainer.connect(self.engines)
        ray.get(connected)

    def update(self, seed: int) -> list[int]:
        updated = self.other.__ray_call__.remote(Trainer.update_as, seed)
        return [self.trainer.update(seed), ray.get(updated)]

    def fails(self, seed: int, *words: str) -> None:
        """Both trainers raise; the first says why, and the other that it did."""
        updated = self.other.__ray_call__.remote(Trainer.update_as, seed)
        for update in (lambda: self.trainer.update(seed), lambda: ray.get(updated)):
            with pytest.raises(WeightSyncError) as raised:
                update()
            for word in words:
                assert word in str(raised.value)

    def versions(self) -> list[int]:
        other = self.other.__ray_call__.remote(lambda actor: actor.miles.updater.weight_version)
        return [self.trainer.updater.weight_version, ray.get(other)]

    def check(self, engine: int, calls: list[str], seed: int) -> None:
        """The engine was called like that, and holds what was trained."""
        called, held = ray.get(self.engines[engine].state.remote())
        assert called == calls
        for rank in range(TP):
            assert_same(held[rank], expected_containers(CONFIG, trained(seed), tp=TP, rank=rank))


@pytest.fixture(scope="module")
def team(cluster: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(cluster[0], str(tmp_path_factory.mktemp("store") / "store"))
    yield team
    for engine in team.engines:
        ray.kill(engine)
    stop([team.other])
    team.trainer.leave()


def test_every_worker_gets_every_version_amid_the_calls_of_miles(team: Team) -> None:
    for version in (1, 2):
        assert team.update(version) == [version, version]
        for engine in range(2):
            team.check(engine, [*BEFORE, *after(version)], seed=version)


def test_rs_3_engines_go_on_with_the_version_before_if_one_cant_take_part(team: Team) -> None:
    ray.get(team.engines[1].broken_at.remote("flush_cache"))
    team.fails(3, "engine 1 did not flush its cache", "not now")
    ray.get(team.engines[0].end_worker.remote(1))
    for engine in range(2):
        team.check(engine, [*BEFORE, "continue_generation"], seed=2)
    team.fails(3, "rollout 1", "its process has ended")
    for engine in range(2):
        team.check(engine, [*BEFORE, "continue_generation"], seed=2)
    assert team.versions() == [2, 2]
    ray.get(team.engines[0].start_worker.remote(1))
    team.connect()
    assert team.update(3) == [3, 3]
    for engine in range(2):
        team.check(engine, [*BEFORE, *after(3)], seed=3)


def test_rs_3_an_engine_with_half_a_version_stands_still_and_the_others_run_it(team: Team) -> None:
    ray.get(team.engines[0].forget_at_next_commit.remote(1))
    team.fails(4, "version 4 is in use", "rollout 1", "model.norm.weight")
    assert team.versions() == [4, 4]
    assert ray.get(team.engines[0].state.remote())[0] == BEFORE
    team.check(1, [*BEFORE, *after(4)], seed=4)
