"""These run against frameworks' published packages, where those are: see `make test-adapters`."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from fabric_ray.integrations import vllm_kv_content
from tests.adapters.sources import published
from tests.adapters.vllm import servers

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Two cores that are busy need longer than Ray allows by default.
os.environ.setdefault("RAY_agent_register_timeout_ms", "180000")

_MISSING = [
    package
    for package in ("peft", "torchtitan", "transformers", "verl", "vllm")
    if find_spec(package) is None
]
collect_ignore = [f"test_{package}.py" for package in _MISSING]
if "transformers" in _MISSING:
    collect_ignore += ["test_published_parameters.py", "test_torchtitan.py"]
if "peft" in _MISSING and "transformers" not in _MISSING:
    collect_ignore.append("test_transformers.py")
if find_spec("megatron") is None:
    _MISSING.append("megatron-core")
    collect_ignore.append("test_megatron.py")
if "vllm" in _MISSING:
    collect_ignore_glob = ["test_vllm_kv*.py", "test_chat_templates.py"]
if "vllm" in _MISSING or find_spec("compressed_tensors") is None:
    collect_ignore.append("test_moe_casts.py")
if published("miles") is None:
    _MISSING.append("miles")
    collect_ignore += ["test_miles.py", "test_miles_pushes.py"]

# Its callers are vLLM's and SGLang's classes, and miles' Megatron-Core.
if published("sglang", "sglang") is None or {"vllm", "miles"} & {*_MISSING}:
    collect_ignore.append("test_moe_callers.py")
if published("sglang", "sglang") is None or find_spec("checkpoint_engine") is None:
    _MISSING.append("checkpoint-engine or sglang")
    collect_ignore.append("test_mooncake_callers.py")
if published("nixl_cu12", "nixl-cu12") is None or "vllm" in _MISSING:
    _MISSING.append("nixl")
    collect_ignore.append("test_nixl_callers.py")

if os.environ.get("FABRIC_RAY_ADAPTERS") == "require":
    if _MISSING:
        raise pytest.UsageError(
            f"build/adapters lacks {' and '.join(_MISSING)}; remove .make/adapters"
        )
    if not servers.PYTHON.exists():
        raise pytest.UsageError(f"no vLLM at {servers.PYTHON}; remove .make/vllm")
    if not servers.SKYRL_PYTHON.exists():
        raise pytest.UsageError(f"no SkyRL at {servers.SKYRL_PYTHON}; remove .make/skyrl")


@pytest.fixture(autouse=True)
def weights_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, whatever updates earlier tests loaded: pages are of one version."""
    monkeypatch.setattr(vllm_kv_content, "_weights", vllm_kv_content._Weights())


def pytest_report_header() -> str:
    missing = f"without {' and '.join(_MISSING)}: run make test-adapters" if _MISSING else "all"
    return f"adapters: {missing}"
