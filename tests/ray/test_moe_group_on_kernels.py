"""Actors whose exchange kernels make: the model of one place, with a rank left out too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe.group import ExpertGroup
from fabric_ray.moe.layer import MoeConfig
from fabric_ray.moe.model import MoeModel, MoeModelConfig
from tests.host_kernels import exchange_kernels

CONFIG = MoeModelConfig(
    moe=MoeConfig(hidden=32, experts=6, topk=3, intermediate=16, shared_intermediate=16),
    vocab=64,
    positions=64,
)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8]]


@pytest.mark.long
def test_actors_on_kernels_say_what_is_said_in_one_place(
    cluster: list[str], tmp_path: Path
) -> None:
    exchange_kernels(tmp_path)
    whole = MoeModel(CONFIG, seed=5)
    made = partial(exchange_kernels, tmp_path)
    options = {"ranks": 2, "seed": 5, "max_tokens": 8, "cpus_per_rank": 0.1, "timeout": 30.0}
    with ExpertGroup(CONFIG, launcher=made, **options) as group:
        said = group.generate(PROMPTS, 3)
        assert said.tokens == whole.generate(PROMPTS, 3)
        rows = sum(t.rows for t in said.traffic.values())
        read = sum(len(prompt) + generated for prompt in PROMPTS for generated in range(3))
        assert rows == CONFIG.layers * 3 * read
        group.mask(1)
        found = group.forward(PROMPTS)
        assert found.left_out == (3, 4, 5)
        expected = whole.forward(PROMPTS, left_out=found.left_out)
        assert all(torch.equal(a, b) for a, b in zip(found.logits, expected, strict=True))
        group.join()
        assert group.generate(PROMPTS, 2).tokens == whole.generate(PROMPTS, 2)


def test_gpus_that_there_are_not_are_said_to_be_missing(cluster: list[str]) -> None:
    with pytest.raises(errors.FabricError, match=r"no place for 2 ranks.*GPU.*gpus_per_rank"):
        ExpertGroup(CONFIG, ranks=2, cpus_per_rank=0.1, gpus_per_rank=1.0, start_timeout=2.0)
    with pytest.raises(errors.InvalidArgument, match="gpus_per_rank is -1"):
        ExpertGroup(CONFIG, ranks=2, gpus_per_rank=-1.0)
