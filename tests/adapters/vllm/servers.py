"""Real vLLM servers on this machine's CPUs, with tiny random models.

``FABRIC_RAY_VLLM_PYTHON`` names the Python of an environment with vLLM; by default it is
``build/vllm/bin/python``, which ``make test-adapters`` fills with vLLM's CPU build. A module that
needs servers says ``pytestmark = servers.needed``::

    with servers.running(Spec("p", ("--block-size", "32")), Spec("d")) as (p, d):
        p.complete([5, 6, 7], 8)

Each server takes 2-3 GB and about a minute to start.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp, mkstemp
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("FABRIC_RAY_VLLM_PYTHON") or ROOT / "build/vllm/bin/python")
SKYRL_PYTHON = Path(os.environ.get("FABRIC_RAY_SKYRL_PYTHON") or ROOT / "build/skyrl/bin/python")
"""Of an environment with SkyRL and the vLLM that it pins."""
PORTS = range(8100, 8200)
START = 1200.0
"""Seconds that a server has until it answers."""
MODEL = "tiny"
"""The name of the model in requests."""

_TINY_LLAMA = ROOT / "examples/serve_llm/tiny_model.py"
_TINY_HYBRID = Path(__file__).with_name("tiny_hybrid.py")
VOCABULARY = 2048
"""Of the tiny models: ids from 4 are words."""
CONTEXT = 2048
"""Tokens of a prompt and its answer, at most."""

MISSING = (
    None
    if PYTHON.exists()
    else f"no vLLM at {PYTHON}: run make test-adapters, or set FABRIC_RAY_VLLM_PYTHON to the "
    "Python of an environment that has it"
)
"""Why no server can be started, if none can."""

needed = [
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
    # make test doesn't start servers, though an earlier make test-adapters has made what they need.
    pytest.mark.skipif("FABRIC_RAY_ADAPTERS" not in os.environ, reason="run make test-adapters"),
    # The start of the servers counts for the first test that uses them.
    pytest.mark.timeout(2400),
]


@dataclass(frozen=True)
class Spec:
    """A server to start."""

    name: str
    """Of its log."""
    arguments: tuple[str, ...] = ()
    """Of ``vllm serve``, after those of every server here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    """Of the model's weights."""
    kind: str = "llama"
    """Of model: a Llama, or one of those in ``tiny_hybrid.py``."""
    checkpoint: Path | None = None
    """In place of that of the seed and the kind."""
    program: tuple[str | Path, ...] = (PYTHON, "-m", "vllm.entrypoints.cli.main")
    """That takes the arguments of ``vllm``."""


class Server:
    """A server that runs. Its methods raise :class:`ServerError` on any answer but 200."""

    def __init__(self, spec: Spec, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.spec, self.process, self.log = spec, process, log
        self.url = f"http://127.0.0.1:{port}"

    def complete(
        self,
        prompt: list[int],
        tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The whole response of a greedy completion of so many tokens."""
        body = _greedy(prompt, tokens, kv_transfer_params, **fields)
        answer: dict[str, Any] = self.post("/v1/completions", body)
        return answer

    def stream(
        self,
        prompt: list[int],
        tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Iterator[list[int]]:
        """The tokens of a greedy completion, as they come."""
        path = "/v1/completions"
        body = _greedy(prompt, tokens, kv_transfer_params, stream=True)
        with self._open(path, json.dumps(body).encode(), 180.0) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "choices" not in chunk:
                    raise ServerError(f"server {self.spec.name}, {path}: {chunk}", self)
                yield chunk["choices"][0]["token_ids"]

    def tokens(
        self,
        prompt: list[int],
        count: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a greedy completion."""
        found: list[int] = self.complete(prompt, count, kv_transfer_params)["choices"][0][
            "token_ids"
        ]
        return found

    def post(self, path: str, body: object | None = None, *, timeout: float = 180.0) -> Any:
        """Posts JSON; what comes back, read as JSON where it is any."""
        text = self._ask(path, b"" if body is None else json.dumps(body).encode(), timeout)
        return json.loads(text) if text[:1] in ("{", "[") else text

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        return self._ask(path, None, timeout)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.M)
        return sum(float(value) for value in found)

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, deadline: float) -> None:
        """Returns when it takes requests.

        Raises:
            ServerError: it has ended, or isn't there at the deadline (of the monotonic clock).
        """
        while True:
            if self.process.poll() is not None:
                raise ServerError(f"server {self.spec.name} has ended while it started", self)
            with suppress(ServerError):
                self.get("/health", timeout=5.0)
                return
            if time.monotonic() > deadline:
                raise ServerError(f"server {self.spec.name} doesn't answer", self)
            time.sleep(0.5)

    def kill(self) -> None:
        """Ends its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10.0)

    def stop(self) -> None:
        """Ends it and the processes it has started."""
        for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        # Processes of the engine may outlive the one that was waited for.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _ask(self, path: str, data: bytes | None, timeout: float) -> str:
        with self._open(path, data, timeout) as response:
            text: str = response.read().decode()
            return text

    @contextmanager
    def _open(self, path: str, data: bytes | None, timeout: float) -> Iterator[Any]:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                yield response
                return
        except urllib.error.HTTPError as error:
            why = f"{error.code}: {error.read().decode(errors='replace')[:500]}"
        except OSError as error:
            why = str(error)
        raise ServerError(f"server {self.spec.name}, {path}: {why}", self)


def _greedy(
    prompt: list[int], tokens: int, kv_transfer_params: Mapping[str, Any] | None, **fields: Any
) -> dict[str, Any]:
    """The body of a request for so many tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    return body


class ServerError(AssertionError):
    """A server didn't do what was asked; carries the end of its log."""

    def __init__(self, what: str, server: Server) -> None:
        self.log = server.log
        super().__init__(f"{what}\n--- {server.log}:\n{server.tail()}")


@contextmanager
def running(*specs: Spec) -> Iterator[tuple[Server, ...]]:
    """Starts servers side by side; they end with the block."""
    started: list[Server] = []
    try:
        for spec in specs:
            started.append(_start(spec))
        deadline = time.monotonic() + START
        for server in started:
            server.wait_ready(deadline)
        yield tuple(started)
    finally:
        for server in started:
            server.stop()


@cache
def tiny_model(seed: int = 1, kind: str = "llama") -> Path:
    """The folder of a tiny model's checkpoint, with weights of this seed."""
    folder = Path(mkdtemp(prefix="fabric-ray-tiny-"))
    command = [PYTHON, _TINY_LLAMA, folder, str(seed)]
    if kind != "llama":
        command = [PYTHON, _TINY_HYBRID, folder, str(seed), kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if made.returncode:
        shutil.rmtree(folder)
        raise AssertionError(f"the model could not be written: {made.stderr[-2000:]}")
    return folder


class Process:
    """A trainer's, with vLLM's classes; it answers each line of JSON by one."""

    def __init__(self, command: Sequence[str | Path], log: Path, path: str = str(ROOT)) -> None:
        self._log = open(log, "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        self._log.seek(0)
        raise AssertionError(f"the trainer has ended: {self._log.read()[-2000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)


@contextmanager
def plugin_path() -> Iterator[str]:
    """What an installation has beside the package: the entry point that vLLM loads."""
    with TemporaryDirectory(prefix="fabric-ray-plugin-") as folder:
        info = Path(folder) / "fabric_ray-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fabric-ray\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nfabric = fabric_ray.integrations.vllm_plugin:load\n"
        )
        yield f"{ROOT}:{folder}"


PATIENT = {"lease": 600.0, "timeout": 600.0, "terms": {"silence": 120.0}}
"""Limits of the connector where servers spin on all cores, and may stand still for a minute."""


def kv_transfer(role: str, *, policy: str = "fail", **extra: Any) -> tuple[str, str]:
    """The argument that gives a server this project's KV connector, with vLLM's ``policy`` for
    loads that fail."""
    config = {
        "kv_connector": "FabricRayConnector",
        "kv_connector_module_path": "fabric_ray.integrations.vllm_kv",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {**PATIENT, **extra},
    }
    return "--kv-transfer-config", json.dumps(config)


def _start(spec: Spec) -> Server:
    port = reserved_port()
    handle, name = mkstemp(prefix=f"vllm-{spec.name}-", suffix=".log")
    arguments = [
        "serve",
        str(spec.checkpoint or tiny_model(spec.seed, spec.kind)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL, "--seed", "0"),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"),
        *spec.arguments,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **spec.environment,
    }
    with os.fdopen(handle, "wb") as log:
        process = subprocess.Popen(
            [*spec.program, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
    return Server(spec, port, process, Path(name))


_given: set[int] = set()
_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port to which no process is bound."""
    with _bound() as probe:
        _given.add(port := probe.getsockname()[1])
        return int(port)


def reserved_port() -> int:
    """A port that no other run of the tests gets until this process ends. vLLM binds its own late
    and listens later. Of two servers one gets the requests of both."""
    _reserved.append(holder := _bound())
    # It doesn't listen. A server, which sets the same, binds beside it; a probe does not.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return int(holder.getsockname()[1])


def _bound() -> socket.socket:
    # Not the first one: another run of the tests on this machine would pick it, too.
    for port in random.sample(PORTS, len(PORTS)):
        probe = socket.socket()
        if port not in _given:
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return probe
        probe.close()
    raise AssertionError(f"no port is free from {PORTS[0]} to {PORTS[-1]}")
