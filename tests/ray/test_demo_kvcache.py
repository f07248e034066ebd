"""The demo of disaggregated inference: it streams, scales, loses a prefiller, and is right."""

from __future__ import annotations

import pytest
import ray

from tests.ray.demo_command import run_demo

pytest.importorskip("uvicorn")
from fabric_ray.demo.kvcache import serve_args
from fabric_ray.demo.options import KvCache


def test_the_engines_use_the_transport_that_was_named() -> None:
    assert serve_args(KvCache(transport="tcp")).fabric.transport == ("tcp",)


@pytest.mark.long
def test_the_command_scales_and_kills_and_prints_one_json_object(cluster: list[str]) -> None:
    address = ray.get_runtime_context().gcs_address
    result = run_demo("kvcache", "--seconds", "6", "--clients", "3", address=address)
    assert result["streamed"]["tokens"] == 24
    layers = result["streamed"]["layers"]
    assert [at["layer"] for at in layers] == list(range(len(layers)))
    assert len(layers) > 1
    for at in layers:
        assert 0 <= at["computed"] <= at["posted"] <= at["delivered"]
    computed = [at["computed"] for at in layers]
    assert computed == sorted(computed)
    assert result["requests"] > 3
    assert result["wrong"] == 0
    assert any("kill -9" in event["what"] for event in result["events"])
    assert sum(replica["role"] == "decode" for replica in result["replicas"]) == 2
