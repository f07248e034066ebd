"""Hosts that plan the same push get the same plan, byte for byte, whatever else differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fabric_ray.models.config import ModelConfig, Moe, parameter_shapes
from fabric_ray.plan import (
    DType,
    ParamMeta,
    Plan,
    Replicate,
    Shard,
    plan,
    side_from_param_meta,
)
from fabric_ray.weights.families import target_side

ROOT = Path(__file__).parents[3]
REPLICAS, SHARDS = 2, 3


def model() -> ModelConfig:
    return ModelConfig(
        kind="qwen3_moe",
        vocab=997,
        hidden=48,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        qk_norm=True,
        moe=Moe(experts=10, top_k=2, intermediate=32),
    )


def reports() -> dict[int, list[ParamMeta]]:
    """Trainers in two replicas, so that there is a choice of sender for every byte."""
    ranks = tuple(range(REPLICAS * SHARDS))
    found: dict[int, list[ParamMeta]] = {rank: [] for rank in ranks}
    bf16 = DType.of("bfloat16")
    for name, shape in parameter_shapes(model()).items():
        step = -(-shape[0] // SHARDS)
        for rank in ranks:
            rows = max(0, min(shape[0] - rank % SHARDS * step, step))
            local = (rows, *shape[1:])
            found[rank].append(
                ParamMeta(
                    name=name,
                    shape=shape,
                    dtype=bf16,
                    mesh_ranks=ranks,
                    mesh_shape=(REPLICAS, SHARDS),
                    placements=(Replicate(), Shard(0)),
                    local_shape=local,
                    local_strides=(*(2 * n for n in shape[1:]), 2),
                )
            )
    for rank in ranks[1::2]:
        # Ranks disagree on the order; that of the lowest one counts.
        found[rank].reverse()
    return found


def planned(*, seed: int | None = None) -> Plan:
    """``seed`` shuffles the order in which ranks' reports come in."""
    gathered = list(reports().items())
    if seed is not None:
        random.Random(seed).shuffle(gathered)
    source = side_from_param_meta(dict(gathered))
    return plan(source, target_side(model(), tp=4, ep=2, ranks=range(8)), min_split_bytes=64)


@pytest.mark.parametrize("environment", [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "4242"}])
def test_another_process_makes_the_same_plan(environment):
    code = "from tests.unit.plan.test_determinism import planned; print(planned().digest())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(ran.stdout) == planned().digest()


def test_threads_that_plan_at_once_make_the_same_plan():
    expected = planned().to_bytes()
    with ThreadPoolExecutor(8) as threads:
        assert {p.to_bytes() for p in threads.map(lambda _: planned(), range(16))} == {expected}


def test_the_order_in_which_reports_arrive_is_no_matter():
    expected = planned().to_bytes()
    assert {planned(seed=seed).to_bytes() for seed in range(8)} == {expected}
