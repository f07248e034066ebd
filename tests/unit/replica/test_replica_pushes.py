"""Pushes by way of replicas: every rollout holds, bit for bit, what whole tensors give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fabric_ray.weights.families import target_side
from fabric_ray.weights.reference import expected_containers
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import LAID_OUT, SMALL
from tests.unit.replica.setups import Setup, closing, split


@pytest.fixture
def open_setup() -> Iterator[Callable[..., Setup]]:
    yield from closing([])


MODELS = SMALL | LAID_OUT
# Model, trainers by stage, tp, ep, dp, engines.
CASES = [
    ("llama", [1], 2, 1, 1, 1),
    ("llama-3.1", [2], 4, 1, 1, 1),
    ("qwen2", [3], 1, 1, 1, 4),
    ("qwen3", [2, 1], 2, 1, 1, 2),
    ("qwen3_moe", [2, 2], 4, 4, 1, 2),
    ("qwen2_moe", [3], 2, 2, 1, 2),
    ("glm4_moe", [1, 2, 1], 2, 1, 1, 1),
    ("deepseek_v3", [2, 2], 2, 4, 2, 1),
    ("deepseek_v2-lite", [1], 2, 2, 1, 1),
    ("kimi_k2", [5], 1, 3, 3, 1),
]


@pytest.mark.parametrize(("model", "stages", "tp", "ep", "dp", "engines"), CASES)
def test_every_rollout_holds_what_whole_tensors_give(
    open_setup: Callable[..., Setup],
    model: str,
    stages: list[int],
    tp: int,
    ep: int,
    dp: int,
    engines: int,
) -> None:
    config = MODELS[model]
    side = target_side(config, tp=tp, ep=ep, dp=dp, ranks=range(tp * dp * engines))
    full = {name: tensor.clone() for name, tensor in noise(config).items()}
    biggest = max(tensor.nbytes for tensor in full.values())
    setup = open_setup(
        list(zip(stages, split(full, len(stages)), strict=True)), side, bucket=biggest
    )
    for _ in range(2):
        report = setup.sync.push()
        for target in setup.targets:
            rank = target.rank % (tp * dp)
            expected = expected_containers(config, full, tp=tp, ep=ep, dp=dp, rank=rank)
            assert_same(target.weights, expected)
        for tensor in full.values():
            tensor.mul_(0.5)
    assert len(report.temporary) == sum(stages)
