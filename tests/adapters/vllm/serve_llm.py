"""examples/serve_llm with real vLLM engines, as a user runs it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import psutil

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import PYTHON, ROOT, VOCABULARY, Server, tiny_model

_APP = ROOT / "examples/serve_llm/app.py"
_PROMPTS, TOKENS = 16, 12


class App:
    """The example's application, in processes of its own."""

    def __init__(self, *options: str) -> None:
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
                [PYTHON, _APP, "--model", tiny_model(), "--port", str(port), *options],
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
            "max_tokens": TOKENS,
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

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and f"pd:{deployment}:model" in title:
                    found.append(process)
        assert found, f"there is no replica of {deployment}\n{self.tail()}"
        return found

    def stop(self) -> None:
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for process in [*started, self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def running(*options: str) -> Iterator[App]:
    """The application with these options, once it answers."""
    app = App(*options)
    try:
        app.wait_ready()
        yield app
    finally:
        app.stop()


def external_hits() -> float:
    """Tokens whose pages came from a prefiller, as Ray exports vLLM's metric."""
    found = Path("/tmp/ray/prom_metrics_service_discovery.json")
    name = "ray_vllm_external_prefix_cache_hits_total"
    total = 0.0
    for target in json.loads(found.read_text())[0]["targets"] if found.exists() else ():
        with suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics") as response:
            lines = response.read().decode().splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(name))
    return total


def prompts_of(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    shared = [source.randrange(4, VOCABULARY) for _ in range(64)]
    made = []
    for i in range(_PROMPTS):
        own = [source.randrange(4, VOCABULARY) for _ in range(source.randrange(1, 400))]
        made.append(shared + own if i % 2 else own)
    return made


def expected_of(plain: Server, prompts: list[list[int]]) -> list[str]:
    return [plain.complete(prompt, TOKENS)["choices"][0]["text"] for prompt in prompts]


def ask_all(app: App, prompts: list[list[int]], at_once: int = 4, **fields: Any) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: app.complete(prompt, **fields), prompts))
