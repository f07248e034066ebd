"""SkyRL 0.4 with its own servers, sources and trainers' code, and the weight sync backend
``fabric``. It pins vLLM 0.30."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import SKYRL_PYTHON as PYTHON
from tests.adapters.vllm.servers import Spec, plugin_path
from tests.adapters.vllm.test_weights import (
    BACKEND,
    BLOCKS,
    NEW,
    OLD,
    ShardedTrainers,
    Stand,
    answers,
    sharded_trainers,
    stand_of,
)

_EXTENSION = (
    "--worker-extension-cls",
    "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap",
)

_ELEMENTS = 3_410_176
"""Of the tiny model."""

_SITE = Path(__file__).with_name("skyrl_site")

# Where adapters must be tested, tests/adapters/conftest.py refuses to go on without SkyRL.
pytestmark = servers.needed


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """Two servers of SkyRL, of which the second begins with the new weights."""
    program = (PYTHON, Path(__file__).with_name("skyrl_server.py"))
    with plugin_path() as path:
        environment = {"PYTHONPATH": f"{path}:{_SITE}"}
        arguments = (*BLOCKS, *BACKEND, *_EXTENSION, "--dtype", "bfloat16")
        specs = [
            Spec(f"skyrl{seed}", arguments, environment, seed, program=program)
            for seed in (OLD, NEW)
        ]
        with servers.running(*specs) as pair:
            yield stand_of(*pair)


def skyrl_trainers(
    stand: Stand, *, streams: bool = False, **config: Any
) -> AbstractContextManager[ShardedTrainers]:
    return sharded_trainers(
        stand.server,
        stand.plain,
        program="skyrl_trainer.py",
        python=PYTHON,
        path=f"{servers.ROOT}:{_SITE}",
        streams=streams,
        config=config,
    )


def all_right(stand: Stand, version: int) -> bool:
    return answers(stand.server) == answers(stand.plain) == stand.expected[version]


@pytest.mark.parametrize("streams", [False, True], ids=["shards", "streamed"])
def test_rs_3_skyrl_trainers_update_skyrl_servers(stand: Stand, streams: bool) -> None:
    with skyrl_trainers(stand, streams=streams) as trainers:
        for version in (NEW, OLD):
            said = trainers.send(version)
            assert said["error"] is None
            # To each of two servers, and in their bfloat16.
            assert said["bytes"] == (0 if streams else 2 * 2 * _ELEMENTS)
            assert all_right(stand, version)


def test_servers_that_skyrl_has_paused_stay_paused(stand: Stand) -> None:
    with skyrl_trainers(stand) as trainers:
        # As RemoteInferenceClient.pause_generation does.
        for server in (stand.server, stand.plain):
            server.post("/pause?mode=keep&clear_cache=false")
        assert trainers.send(NEW)["error"] is None
        assert stand.is_paused()
        for server in (stand.server, stand.plain):
            server.post("/resume")
        assert all_right(stand, NEW)
        assert trainers.send(OLD)["error"] is None
        assert not stand.is_paused()
        assert all_right(stand, OLD)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"speculative_config": {"method": "mtp"}}, "speculative_config"),
        ({"engine_init_kwargs": {"kv_transfer_config": {}}}, "kv_transfer_config"),
    ],
)
def test_what_an_update_would_miss_is_refused(
    stand: Stand, config: dict[str, Any], what: str
) -> None:
    with skyrl_trainers(stand, **config) as trainers:
        error = trainers.send(NEW)["error"]
    assert error is not None
    assert error.startswith("Unsupported")
    assert what in error
    assert all_right(stand, OLD)


def run(program: str, *arguments: str) -> str:
    """What a program says that imports SkyRL."""
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": f"{servers.ROOT}:{_SITE}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


_CHOICES = """
import sys
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.train.config import SkyRLTrainConfig

config = SkyRLTrainConfig()
config.trainer.policy.model.path = sys.argv[1]
config.generator.inference_engine.weight_sync_backend = sys.argv[2]
config.trainer.placement.colocate_all = sys.argv[3] == "colocated"
print("chosen", build_vllm_cli_args(config).weight_transfer_config.backend)
"""


@pytest.mark.parametrize(
    ("backend", "placement", "said"),
    [
        ("fabric", "apart", "chosen fabric"),
        ("nccl", "apart", "chosen skyrl_nccl"),
        ("fabric", "colocated", "Unsupported"),
    ],
)
def test_skyrl_starts_servers_with_the_backend(backend: str, placement: str, said: str) -> None:
    found = run(_CHOICES, str(servers.tiny_model(OLD)), backend, placement)
    assert said in found, found[-3000:]


# The server's address is of nothing, so whatever is opened fails.
_ADAPTERS = """
import sys
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine
from skyrl.train.config import InferenceEngineConfig

base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
module = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
engine = build_trainer_engine(
    ie_cfg=InferenceEngineConfig(weight_sync_backend="fabric"),
    colocate_all=False,
    rank=0,
    inference_world_size=1,
    source_factory=lambda dtype, _: FsdpWeightSource(module, dtype),
    draft_source_factory=None,
    server_urls=["http://127.0.0.1:9"],
    data_parallel_size=1,
)
print("opened")
engine.send_weights()
"""


def test_a_module_with_adapters_opens_nothing_and_is_never_sent() -> None:
    found = run(_ADAPTERS, str(servers.tiny_model(OLD)))
    assert "opened" in found, found[-3000:]
    assert "Unsupported" in found.rpartition("opened")[2]
