"""The back end for Ray Serve LLM by itself: what it makes of configurations and requests. It runs
under the servers' Python, which has Ray's extra ``llm``."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.adapters.vllm import servers

pytestmark = servers.needed

PROGRAM = """
import json, sys
from types import SimpleNamespace
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
from fabric_ray.integrations.ray_llm import FabricRayConnectorBackend

config, fields = json.loads(sys.argv[1]), json.loads(sys.argv[2])
made = FabricRayConnectorBackend(
    SimpleNamespace(engine_kwargs={"kv_transfer_config": config}, get_engine_config=None)
)
try:
    made.setup()
    request = CompletionRequest(model="tiny", prompt="w4 w5", **fields)
    prefill = made.prepare_prefill_request(request=request, peer=None)
    peer = {"remote_offer": "offer", "peers": made._peers()}
    decode = made.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    answer = prefill.kv_transfer_params, decode.kv_transfer_params, None
except Exception as error:
    answer = None, None, f"{type(error).__name__}: {error}"
print("> " + json.dumps([*answer, config]))
"""


def run(program: str, *given: str, **environment: str) -> Any:
    """What a program prints after ``> ``, from JSON."""
    done = subprocess.run(
        [servers.PYTHON, "-c", program, *given],
        env={
            **os.environ,
            "PYTHONPATH": str(servers.ROOT),
            "VLLM_TARGET_DEVICE": "cpu",
            "RAY_worker_niceness": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("> ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0][2:])


def shaped(config: dict[str, Any], **fields: Any) -> tuple[Any, Any, str | None, dict[str, Any]]:
    """The parameters of a request's prefill and decode, the error, and the configuration after."""
    given = json.dumps(config), json.dumps(fields)
    prefill, decode, error, after = run(PROGRAM, *given, FABRIC_RAY_TOKEN="t")
    return prefill, decode, error, after


def test_an_empty_extra_configuration_is_as_none() -> None:
    config = {"kv_connector": "FabricRayConnector", "kv_role": "kv_both"}
    prefill, decode, error, after = shaped({**config, "kv_connector_extra_config": None})
    assert error is None
    assert after["kv_connector_extra_config"]["offer_file"]
    assert decode["transfer_id"] == prefill["transfer_id"]


def test_a_decoder_that_loads_no_pages_is_refused_by_its_role() -> None:
    config = {"kv_connector": "FabricRayConnector", "kv_role": "kv_producer"}
    *_, error, _ = shaped(config)
    assert error is not None
    assert error.startswith("InvalidArgument")
    assert "kv_role" in error


def test_beams_compute_their_prompt() -> None:
    config = {"kv_connector": "FabricRayConnector", "kv_role": "kv_consumer"}
    prefill, decode, error, _ = shaped(config, use_beam_search=True)
    assert (prefill, decode, error) == (None, None, None)


CLUSTERS = """
import json
import ray
import fabric_ray.integrations.ray_llm

@ray.remote
def found():
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    return KVConnectorBackendFactory.get_backend_class("FabricRayConnector").__name__

answers = []
for _ in range(2):
    ray.init("local", num_cpus=1, include_dashboard=False)
    answers.append(ray.get(found.remote()))
    ray.shutdown()
print("> " + json.dumps(answers))
"""


def test_every_cluster_of_a_driver_has_the_back_end() -> None:
    assert run(CLUSTERS) == ["FabricRayConnectorBackend"] * 2


NODES = """
import json, logging, os
from pathlib import Path
from types import SimpleNamespace
import ray
from ray.cluster_utils import Cluster
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

@ray.remote
class Node:
    # The replicas of a node, with these tokens.

    def backend(self, token):
        from fabric_ray.integrations.ray_llm import FabricRayConnectorBackend
        os.environ["FABRIC_RAY_TOKEN"] = token
        config = {"kv_connector": "FabricRayConnector", "kv_role": "kv_both"}
        return FabricRayConnectorBackend(
            SimpleNamespace(engine_kwargs={"kv_transfer_config": config}, get_engine_config=None)
        )

    def metadata(self, token):
        made, said = self.backend(token), []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("fabric_ray").addHandler(handler)
        made.setup()
        extra = made.kv_transfer_config["kv_connector_extra_config"]
        Path(extra["offer_file"]).write_text("offer")
        return made.replica_metadata(), said

    def decode(self, token, peer):
        made, request = self.backend(token), CompletionRequest(model="tiny", prompt="w4 w5")
        made.prepare_prefill_request(request=request, peer=peer)
        try:
            made.prepare_decode_request(request=request, peer=peer, prefill_response=None)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "resources": {"a": 1}, "include_dashboard": False},
)
cluster.add_node(num_cpus=1, resources={"b": 1})
ray.init(cluster.address)
a, b = (Node.options(resources={node: 1}).remote() for node in "ab")
(peer, said), (with_token, unsaid) = ray.get([a.metadata.remote(token) for token in ("", "t")])
answers = {
    "said": said,
    "unsaid": unsaid,
    "same node": ray.get(a.decode.remote("", peer)),
    "other node": ray.get(b.decode.remote("", peer)),
    "one has a token": ray.get(a.decode.remote("t", peer)),
    "both have": ray.get(b.decode.remote("t", with_token)),
}
ray.shutdown()
cluster.shutdown()
print("> " + json.dumps(answers))
"""


def test_replicas_that_cannot_reach_each_other_are_told_to_share_a_token() -> None:
    found = run(NODES)
    (said,) = found["said"]
    assert "2 nodes" in said
    assert found["unsaid"] == []
    assert found["same node"] is None
    assert found["both have"] is None
    for error in said, found["other node"], found["one has a token"]:
        assert "export FABRIC_RAY_TOKEN" in error


BUILT = """
import json, sys
import ray
from fabric_ray.integrations.ray_llm import build_pd_openai_app

ray.init("local", num_cpus=1, include_dashboard=False)

def engine(role):
    transfer = {"kv_connector": "FabricRayConnector", "kv_role": role}
    return {
        "model_loading_config": {"model_id": "tiny"},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {"kv_transfer_config": transfer},
    }

answers = []
for prefill, decode in json.loads(sys.argv[1]):
    try:
        sides = {"prefill_config": engine(prefill), "decode_config": engine(decode)}
        answers.append(type(build_pd_openai_app(sides)).__name__)
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print("> " + json.dumps(answers))
"""


def test_sides_with_the_others_role_are_refused_when_the_application_is_built() -> None:
    roles = [
        ("kv_producer", "kv_consumer"),
        ("kv_both", "kv_both"),
        ("kv_consumer", "kv_consumer"),
        ("kv_producer", "kv_producer"),
    ]
    *right, prefill, decode = run(BUILT, json.dumps(roles))
    assert right == ["Application"] * 2
    assert prefill.startswith("InvalidArgument: prefill_config, field `kv_role`")
    assert decode.startswith("InvalidArgument: decode_config, field `kv_role`")


OLDER = """
import json
from ray.llm._internal.serve.engines.vllm.kv_transfer import base

del base.BaseConnectorBackend.requires_peer_binding  # Ray 2.56 has none
try:
    import fabric_ray.integrations.ray_llm
except Exception as error:
    print("> " + json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_a_ray_without_the_hooks_is_refused_by_its_version() -> None:
    error = run(OLDER)
    assert error.startswith("Unsupported: ")
    for part in ("requires_peer_binding", "got Ray 2.", "expected 2.57 to 2.60", "pip install"):
        assert part in error
