"""examples/serve as a reader runs it: the app, a question by curl, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from fabric_ray.serve import ServeArgs, build_app
from tests.ports import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve"


@pytest.fixture
def program(cluster: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """app.py, and where it will listen."""
    port, _ = free_ports()
    address = ray.get_runtime_context().gcs_address
    program = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLE / "app.py"), "--port", str(port)],
        env=os.environ | {"RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield program, f"http://127.0.0.1:{port}"
    finally:
        program.kill()
        program.communicate()
        serve.shutdown()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="the example asks by curl")
def test_the_example_answers_curl_and_ends_with_ctrl_c(
    program: tuple[subprocess.Popen[str], str],
) -> None:
    app, url = program
    assert app.stdout is not None
    said: list[str] = []
    # The last of what it says before it only waits.
    while not (said and said[-1].startswith("decode")):
        line = app.stdout.readline()
        assert line, "".join(said)
        said.append(line)
    assert any(line.startswith("12 tokens arrived") for line in said)
    asked = subprocess.run(
        [str(EXAMPLE / "ask.sh"), url], capture_output=True, text=True, timeout=100, check=False
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    whole, chat, *events = [line for line in asked.stdout.splitlines() if line]
    answer = json.loads(whole)
    assert answer["usage"]["completion_tokens"] == 16
    assert json.loads(chat)["choices"][0]["message"]["role"] == "assistant"
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer["choices"][0]["text"]
    app.send_signal(signal.SIGINT)
    rest, _ = app.communicate(timeout=100)
    assert app.returncode == 0, rest
    assert "Traceback" not in rest


def test_the_file_of_the_example_deploys_what_there_is() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLE / "config.yaml").read_text()))
    (application,) = schema.applications
    assert application.import_path == "fabric_ray.serve:build_app"
    args = ServeArgs.model_validate(application.args)
    app = build_app(args)
    (_, decode, prefill) = app._bound_deployment.init_args
    there = {a._bound_deployment.name for a in (app, decode, prefill)}
    assert {d.name for d in application.deployments} <= there
