"""Trillion-parameter models are planned in seconds, in little memory, and evenly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("experts", ["stacked", "named"])
def test_kimi_k2_is_planned_in_seconds_and_evenly(experts):
    command = [sys.executable, "-m", "benchmarks.plan", "--model", "kimi-k2", "--experts", experts]
    result = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    assert result["seconds_plan"] < 10
    assert result["rss_bytes_peak"] < 2 << 30
    assert result["serialised_bytes"] < 50 << 20
    assert result["sender_max_over_mean"] < 1.05
    assert result["receiver_max_over_mean"] < 1.05
    # Bytes of 128 ranks: attention and shared experts on each, one of 32 parts of the experts.
    assert result["bytes"] == 11_118_379_532_288
