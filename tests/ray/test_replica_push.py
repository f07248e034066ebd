"""Sharded trainers gather in their actors, fill replicas and push to rollouts on other raylets."""

from __future__ import annotations

import pytest
import ray

from fabric_ray.models import ModelConfig
from fabric_ray.weights import WeightSync
from fabric_ray.weights.families import target_side
from fabric_ray.weights.reference import expected_containers
from tests.ray.actors import start_gatherers, stop
from tests.unit.families.pushes import assert_same

CONFIG = ModelConfig(
    kind="llama", vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48
)


@pytest.mark.long
def test_fully_sharded_trainers_gather_together_and_fill_every_rollout(cluster: list[str]) -> None:
    trainers, rollouts = start_gatherers(cluster, CONFIG, target_side(CONFIG, tp=2))
    try:
        sync = WeightSync(trainers, rollouts, digest=True)
        for version in (1, 2):
            ray.get([trainer.halve.remote() for trainer in trainers])
            report = sync.push()
            assert report.version == version
            full, _ = ray.get([trainer.gathered.remote() for trainer in trainers])
            for rank, rollout in enumerate(rollouts):
                expected = expected_containers(CONFIG, full, tp=2, rank=rank)
                assert_same(ray.get(rollout.weights.remote()), expected)
        assert {link.trainer for link in report.links} == {0, 1}, "both send"
    finally:
        stop(trainers, rollouts)
