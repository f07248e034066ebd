"""Ray Serve LLM with real vLLM engines: examples/serve_llm, as a user runs it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import psutil
import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import PYTHON, ROOT, VOCABULARY, Server, Spec, tiny_model

pytestmark = servers.needed

_APP = ROOT / "examples/serve_llm/app.py"
_PROMPTS, _TOKENS = 16, 12


class App:
    """The example's application, in processes of its own."""

    def __init__(self) -> None:
        port = servers.free_port()
        self.url = f"http://127.0.0.1:{port}"
        handle, name = mkstemp(prefix="serve-llm-", suffix=".log")
        self.log = Path(name)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "RAY_worker_niceness": "0",
        }
        with os.fdopen(handle, "wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, _APP, "--model", tiny_model(), "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + servers.START
        while f"listens at {self.url}" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.5)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-80:])

    def complete(self, prompt: list[int], **fields: Any) -> str:
        """The text of a greedy completion."""
        text = self.post(prompt, **fields)
        if not fields.get("stream"):
            return str(json.loads(text)["choices"][0]["text"])
        lines = (line.removeprefix("data: ") for line in text.splitlines())
        chunks = (json.loads(line) for line in lines if line.startswith("{"))
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    def post(self, prompt: list[int] | list[list[int]], **fields: Any) -> str:
        """The response to a greedy completion."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.read().decode())

    def replica(self, deployment: str) -> psutil.Process:
        """The process of a deployment's only replica."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and f"pd:{deployment}:model" in title:
                    return process
        raise AssertionError(f"there is no replica of {deployment}\n{self.tail()}")

    def stop(self) -> None:
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for process in [*started, self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    app = App()
    try:
        app.wait_ready()
        yield app
    finally:
        app.stop()


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with servers.running(Spec("plain")) as (server,):
        yield server


def _external_hits() -> float:
    """Tokens whose pages came from a prefiller, as Ray exports vLLM's metric."""
    found = Path("/tmp/ray/prom_metrics_service_discovery.json")
    name = "ray_vllm_external_prefix_cache_hits_total"
    total = 0.0
    for target in json.loads(found.read_text())[0]["targets"] if found.exists() else ():
        with suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics") as response:
            lines = response.read().decode().splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(name))
    return total


def _prompts(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    shared = [source.randrange(4, VOCABULARY) for _ in range(64)]
    made = []
    for i in range(_PROMPTS):
        own = [source.randrange(4, VOCABULARY) for _ in range(source.randrange(1, 400))]
        made.append(shared + own if i % 2 else own)
    return made


def _expected(plain: Server, prompts: list[list[int]]) -> list[str]:
    return [plain.complete(prompt, _TOKENS)["choices"][0]["text"] for prompt in prompts]


def _ask_all(app: App, prompts: list[list[int]], **fields: Any) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda prompt: app.complete(prompt, **fields), prompts))


def test_completions_equal_a_plain_servers_whole_and_streamed(app: App, plain: Server) -> None:
    prompts = _prompts(1)
    expected = _expected(plain, prompts)
    assert _ask_all(app, prompts) == expected
    assert _ask_all(app, prompts, stream=True) == expected
    # The decoder was given most pages, and computed few.
    deadline, wanted = time.monotonic() + 120, sum(map(len, prompts)) / 2
    while (hits := _external_hits()) < wanted:
        assert time.monotonic() < deadline, f"{hits} tokens of {wanted}\n{app.tail()}"
        time.sleep(1)


def test_requests_with_the_same_id_get_each_their_own_pages(app: App, plain: Server) -> None:
    prompts = _prompts(2)
    assert _ask_all(app, prompts, request_id="same") == _expected(plain, prompts)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1, "seed": 7},
        {"min_tokens": 4},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": -1},
        {},
    ],
    ids=repr,
)
def test_rs_1_requests_of_several_passes_are_answered_as_by_a_plain_server(
    app: App, plain: Server, fields: dict[str, Any]
) -> None:
    prompts = _prompts(4)[:3]
    for prompt in prompts if fields else [prompts]:
        expected = plain.complete(prompt, _TOKENS, **fields)["choices"]
        found = json.loads(app.post(prompt, return_token_ids=True, **fields))["choices"]
        assert [each["text"] for each in found] == [each["text"] for each in expected]
        for each, other in zip(found, expected, strict=True):
            tokens = [(x["logprobs"] or {}).get("tokens") for x in (each, other)]
            assert tokens[0] == tokens[1]
            ranks = [x.get("prompt_logprobs") and len(x["prompt_logprobs"]) for x in (each, other)]
            assert ranks[0] == ranks[1]


def test_rs_4_a_killed_prefill_replica_ends_requests_and_its_successor_serves(
    app: App, plain: Server
) -> None:
    prompts = _prompts(3)
    expected = _expected(plain, prompts)
    replica = app.replica("Prefill")
    for process in [*replica.children(recursive=True), replica]:
        process.kill()
    answered, deadline = 0, time.monotonic() + servers.START
    while answered < len(prompts):
        assert time.monotonic() < deadline, app.tail()
        try:
            text = app.complete(prompts[answered])
        except urllib.error.HTTPError:
            time.sleep(1)
            continue
        assert text == expected[answered]
        answered += 1
