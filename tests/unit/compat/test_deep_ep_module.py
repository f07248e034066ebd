"""``import deep_ep`` over fabric-ray, and its refusal beside an installed DeepEP."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_ray import errors
from fabric_ray.compat import shim_path
from fabric_ray.errors import InvalidArgument

ROOT = Path(__file__).parents[3]
# The imports of Megatron-Core, SGLang, vLLM, TorchTitan and DeepEP's own programs.
PROGRAM = """
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t
from deep_ep import HybridEPBuffer
# UCCL-EP's, which has the name deep_ep too.
from deep_ep import check_nvlink_connections, destroy_uccl, initialize_uccl
destroy_uccl(*initialize_uccl(None, 0, 0, 1, None))
from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap
from deep_ep.utils.event import EventOverlap as Again
from deep_ep.buffer import Buffer as Legacy
from deep_ep.buffers.legacy import Buffer as Older
from deep_ep.buffers.elastic import ElasticBuffer as Elastic
from deep_ep.hybrid_ep_buffer import HybridEPBuffer as Hybrid
from deep_ep_cpp import Config as Tuning, EventHandle as Event
import deep_ep, fabric_ray.moe.deepep
assert deep_ep.Buffer is Legacy is Older is fabric_ray.moe.deepep.Buffer
assert (Handle, Overlap, Again) == (EventHandle, EventOverlap, EventOverlap)
assert (Elastic, Hybrid, Tuning, Event) == (ElasticBuffer, HybridEPBuffer, Config, EventHandle)
# A trainer looks for this one before it imports HybridEPBuffer, and asks for the ranks of a node.
import hybrid_ep_cpp
from fabric_ray.moe.store_comm import AloneComm
assert hybrid_ep_cpp.ExtendedMemoryAllocator().detect_accessible_ranks(AloneComm(0, 1)) == 1
print(deep_ep.__file__)
"""


def python(program: str, *path: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*path, str(ROOT)]))
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=240
    )


def test_callers_imports_are_there() -> None:
    done = python(PROGRAM, shim_path("deep_ep"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(shim_path("deep_ep"))


def test_imports_of_nixl_eps_callers_are_there() -> None:
    program = """
import nixl_ep
from nixl_ep.buffer import DEFAULT_TIMEOUT_MS, Buffer
assert Buffer is nixl_ep.Buffer
assert Buffer().timeout_ms == DEFAULT_TIMEOUT_MS == 30_000
"""
    done = python(program, shim_path("nixl_ep"))
    assert done.returncode == 0, done.stderr


def test_an_installed_one_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = shim_path("deep_ep")
    assert shim not in shim_path()
    installed = tmp_path / "deep_ep"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    done = python("import deep_ep", shim, str(tmp_path))
    assert "ImportError: deep_ep over fabric-ray does not take the place" in done.stderr
    assert str(installed) in done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument, match=f"found {installed}.* out of PYTHONPATH"):
        shim_path("deep_ep")
    with pytest.raises(InvalidArgument, match="deep_ep or mooncake or nixl"):
        shim_path("nvshmem")


@pytest.mark.parametrize("name", errors.__all__)
def test_callers_catch_errors_as_those_of_native_layers(name: str) -> None:
    """pybind11 makes ``RuntimeError`` of DeepEP's and NIXL-EP's exceptions, and pplx-garden raises
    it itself."""
    kind = getattr(errors, name)
    error = kind("what failed", peer="rank 1")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, RuntimeError)
        assert str(one) == "what failed"


def test_errors_keep_the_classes_of_python() -> None:
    lost = errors.PeerLost("what failed", peer="rank 1", errno=104)
    assert (lost.errno, lost.peer) == (104, "rank 1")
    assert isinstance(lost, ConnectionError)
    # As DeepEP raises without a group.
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.Unsupported, NotImplementedError)
