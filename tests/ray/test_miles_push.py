"""Trainers of miles push to SGLang's workers by the calls of miles' point-to-point updater."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights.reference import expected_containers
from tests.ray.miles_actors import CONFIG, TP, Engine, Trainer, trained
from tests.unit.families.pushes import assert_same

BEFORE = ["pause_generation retract", "flush_cache", "unpack"]
BACK = ["pack", "continue_generation"]


def after(version: int) -> list[str]:
    return [f"update_weight_version {version}", *BACK]


class Team:
    """Two trainers and two engines of two workers."""

    def __init__(self, store: Path) -> None:
        import time; T=time.time()
        free: Any = {"num_cpus": 0}
        self.trainers = [ray.remote(**free)(Trainer).remote() for _ in range(2)]
        self.engines = [ray.remote(**free)(Engine).remote() for _ in range(2)]
        ray.get([t.join.remote(i, str(store)) for i, t in enumerate(self.trainers)])
        self.connect()
        print("TEAM", time.time()-T)

    def connect(self) -> None:
        ray.get([t.connect.remote(self.engines) for t in self.trainers])

    def update(self, seed: int) -> list[int]:
        return ray.get([t.update.remote(seed) for t in self.trainers])

    def fails(self, seed: int, *words: str) -> None:
        """Both trainers raise; the first says why, and the other that it did."""
        for trainer in [t.update.remote(seed) for t in self.trainers]:
            with pytest.raises(WeightSyncError) as raised:
                ray.get(trainer)
            for word in words:
                assert word in str(raised.value)

    def versions(self) -> list[int]:
        return ray.get([t.version.remote() for t in self.trainers])

    def check(self, engine: int, calls: list[str], seed: int) -> None:
        """The engine was called like that, and holds what was trained."""
        called, held = ray.get(self.engines[engine].state.remote())
        assert called == calls
        for rank in range(TP):
            assert_same(held[rank], expected_containers(CONFIG, trained(seed), tp=TP, rank=rank))


@pytest.fixture(scope="module")
def team(cluster: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(tmp_path_factory.mktemp("store") / "store")
    yield team
    for actor in (*team.trainers, *team.engines):
        ray.kill(actor)


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
        team.check(engine, [*BEFORE[:2], "continue_generation"], seed=2)
    team.fails(3, "rollout 1", "can't be reached")
    for engine in range(2):
        team.check(engine, [*BEFORE, *BACK], seed=2)
    assert team.versions() == [2, 2]
    ray.get(team.engines[0].start_worker.remote(1))
    team.connect()
    assert team.update(3) == [3, 3]
    for engine in range(2):
        team.check(engine, [*BEFORE, *after(3)], seed=3)


def test_rs_3_an_engine_with_half_a_version_stands_still_and_the_others_run_it(team: Team) -> None:
    ray.get(team.engines[0].forget.remote(1))
    team.fails(4, "version 4 is in use", "rollout 1", "model.norm.weight")
    assert team.versions() == [4, 4]
    assert ray.get(team.engines[0].state.remote())[0] == BEFORE
    team.check(1, [*BEFORE, *after(4)], seed=4)
