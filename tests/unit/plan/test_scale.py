"""Trillion-parameter models are planned in seconds, in little memory, and evenly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from fabric_ray.plan import DType, ParamMeta, Shard, side_from_param_meta

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("experts", ["stacked", "named"])
def test_kimi_k2_is_planned_in_seconds_and_evenly(experts):
    options = ["--model", "kimi-k2", "--experts", experts, "--json"]
    command = [sys.executable, "-m", "benchmarks.plan", *options]
    result = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    # One thread plans: this is the time it takes where nothing else runs.
    assert result["cpu_seconds_plan"] < 10
    assert result["peak_bytes"] < 2 << 30
    assert result["serialised_bytes"] < 50 << 20
    assert result["sender_max_over_mean"] < 1.05
    assert result["receiver_max_over_mean"] < 1.05
    # Bytes of 128 ranks: attention and shared experts on each, one of 32 parts of the experts.
    assert result["bytes"] == 11_118_379_532_288


def test_a_hundred_thousand_reports_are_merged_in_seconds():
    ranks, bf16 = tuple(range(256)), DType.of("bfloat16")
    meta = ParamMeta("", (512, 64), bf16, ranks, (256,), (Shard(0),), (2, 64), (128, 2))
    params = [msgspec.structs.replace(meta, name=f"layers.{i}.weight") for i in range(400)]
    began = time.process_time()
    side = side_from_param_meta(dict.fromkeys(ranks, params))
    assert time.process_time() - began < 5
    assert len(side.containers) == 400
