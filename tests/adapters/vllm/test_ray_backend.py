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
    decode = made.prepare_decode_request(
        request=request, peer={"remote_offer": "offer"}, prefill_response=None
    )
    answer = prefill.kv_transfer_params, decode.kv_transfer_params, None
except Exception as error:
    answer = None, None, f"{type(error).__name__}: {error}"
print("> " + json.dumps([*answer, config]))
"""


def shaped(config: dict[str, Any], **fields: Any) -> tuple[Any, Any, str | None, dict[str, Any]]:
    """The parameters of a request's prefill and decode, the error, and the configuration after."""
    done = subprocess.run(
        [servers.PYTHON, "-c", PROGRAM, json.dumps(config), json.dumps(fields)],
        env={**os.environ, "PYTHONPATH": str(servers.ROOT), "VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("> ")]
    assert lines, done.stderr[-3000:]
    prefill, decode, error, after = json.loads(lines[0][2:])
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
