"""Trillion-parameter models are planned in seconds, in little memory, and evenly."""

from __future__ import annotations

import time

import msgspec
import pytest

from benchmarks.plan import PAPER, measure
from fabric_ray.plan import DType, ParamMeta, Shard, side_from_param_meta


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        # Bytes of 128 ranks: attention and shared experts on each, one of 32 parts of the experts.
        ("bfloat16", 11_118_379_532_288),
        ("fp8:128x128", 5_882_391_015_424),
    ],
)
def test_kimi_k2_is_planned_in_seconds_and_evenly(dtype: str, nbytes: int) -> None:
    (case,) = (c for c in PAPER if (c.model, c.dtype) == ("kimi-k2", dtype))
    result = measure(case)
    # One thread plans: this is the time it takes where nothing else runs.
    assert result["spent"]["plan"]["cpu_seconds"] < 10
    assert result["peak_nbytes"] < 1e9
    assert result["encoded_nbytes"] < 50e6
    assert result["balance"]["sender_imbalance"] < 1.05
    assert result["balance"]["receiver_imbalance"] < 1.05
    assert result["balance"]["nbytes"] == nbytes


def test_a_hundred_thousand_reports_are_merged_in_seconds():
    ranks, bf16 = tuple(range(256)), DType.of("bfloat16")
    meta = ParamMeta("", (512, 64), bf16, ranks, (256,), (Shard(0),), (2, 64), (128, 2))
    params = [msgspec.structs.replace(meta, name=f"layers.{i}.weight") for i in range(400)]
    began = time.process_time()
    side = side_from_param_meta(dict.fromkeys(ranks, params))
    assert time.process_time() - began < 5
    assert len(side.containers) == 400
