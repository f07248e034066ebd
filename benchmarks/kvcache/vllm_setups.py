"""Setups to serve a prompt with vLLM: by one server, or by a prefiller and a decoder.

All servers run from the first turn to the last, for a start takes a minute. A signal stops those
whose turn it isn't: NIXL's workers poll while they are idle, which would take a core from others.
A pair is stopped and resumed as a whole, for less time than its ends' heartbeats may be missing.

Each server has half of the CPUs to itself: a prefiller one half, its decoder and the plain server
the other. So what one end of a pair polls is never taken from the other end, and a decoder has the
share of the plain server. Engine and worker of a server are one process, as on a single GPU: on
CPUs vLLM makes two of them, each of which polls a second long for the other's next message.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.harness.cases import MIB
from fabric_ray.bench.results import Absent, ContenderError, Family
from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router
from tests.adapters.vllm.servers import Server, ServerError, Spec

FLOOR, OURS, NIXL = "plain", "fabric-ray", "nixl"
BLOCK = 32
"""Tokens of a block. The tiny model's blocks are moved whole."""

_SETTINGS = ("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(256 * MIB))
"""Connectors touch all of the cache."""
_SERVER_BYTES = 1.6e9
"""Memory that a server takes: an API server and an engine, each with torch."""
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Has vLLM run the worker in the engine's process."""
_THREADS = 64
"""Of this process, for the prefills of concurrent hand-offs."""


class Answer(NamedTuple):
    """What one request brought, in seconds from its start."""

    tokens: list[int]
    first: float
    """Until the first tokens had come."""
    seconds: float


class Setup:
    """One server that prefills and decodes, and what the other setups share.

    Args:
        name: in tables.
        family: what it is to the others.
        used: the servers that take part; tokens come from the last one.
    """

    handoff = ""
    """When the decoder is asked."""

    def __init__(self, name: str, family: Family, *used: Server) -> None:
        self.name, self.family, self.used = name, family, used

    def answer(self, prompt: list[int], count: int) -> Answer:
        """Greedy tokens.

        Raises:
            ContenderError: a server failed, or sent another number of tokens.
        """
        tokens: list[int] = []
        start = time.monotonic()
        first = 0.0
        try:
            for some in self._tokens(prompt, count):
                first = first or time.monotonic() - start
                tokens += some
        except ServerError as error:
            raise ContenderError(str(error)) from error
        seconds = time.monotonic() - start
        if len(tokens) != count:
            raise ContenderError(f"{self.name} sent {len(tokens)} tokens, expected {count}")
        return Answer(tokens, first, seconds)

    def cpu(self) -> float:
        """Seconds of CPU time that its servers' processes have taken so far."""
        return sum(map(cpu_seconds, self._processes()))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _tokens(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        return self.used[-1].stream(prompt, count)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        return [one for server in self.used for one in processes(server)]


def processes(server: Server) -> list[psutil.Process]:
    """Its API server, and those below."""
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def halves() -> tuple[set[int], set[int]]:
    """The CPUs of this process in two parts, which are the same where there is only one CPU."""
    cpus = sorted(os.sched_getaffinity(0))
    middle = len(cpus) // 2
    return set(cpus[:middle] or cpus), set(cpus[middle:])


def pin(server: Server, cpus: set[int]) -> None:
    """Keeps all threads of a server on these CPUs; those that they start later inherit it."""
    for process in processes(server):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cpus)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process, and of those below it that have ended and were waited for. The kernel
    counts in ticks, commonly of 10 ms."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])
    return 0.0


class Sequential(Setup):
    """Prefills, then decodes: vLLM's own protocol of its router and both connectors."""

    handoff = "sequential"

    def __init__(
        self,
        name: str,
        family: Family,
        pool: ThreadPoolExecutor,
        prefiller: Server,
        decoder: Server,
    ) -> None:
        super().__init__(name, family, prefiller, decoder)
        self._router = Router(prefiller, decoder, pool)

    def _tokens(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        params = self._router.prefill(prompt, uuid.uuid4().hex)
        yield from self._router.decoder.stream(prompt, count, params)


class Concurrent(Sequential):
    """Asks both at once: the decoder is told of a prefiller's offer, which is the same for all
    requests. NIXL's decoder needs the blocks of a prefill that is over."""

    handoff = "concurrent"

    def _tokens(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        transfer = uuid.uuid4().hex
        asked = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_offer": self._router.offer,
        }
        prefill = self._router.prefill_soon(prompt, transfer)
        yield from self._router.decoder.stream(prompt, count, asked)
        prefill.result()


@contextmanager
def serving(named: Collection[str]) -> Iterator[list[Setup]]:
    """The plain setup, and pairs by the names of their connectors, with servers that run; they end
    with the block.

    Args:
        named: of ``OURS`` and ``NIXL``.

    Raises:
        ContenderError: there is too little memory, or a server doesn't start.
    """
    roles = ("kv_producer", "kv_consumer")
    specs = [Spec(FLOOR, _SETTINGS, ONE_PROCESS)]
    for name in named:
        specs += [_fabric(role) if name == OURS else _nixl(role) for role in roles]
    free, needed = _available(), len(specs) * _SERVER_BYTES
    if free < needed:
        raise ContenderError(
            f"{len(specs)} servers need {needed / 1e9:.0f} GB of memory, and {free / 1e9:.1f} GB "
            "are available; end other programs"
        )
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        try:
            plain, *pairs = stack.enter_context(servers.running(*specs))
        except ServerError as error:
            raise ContenderError(str(error)) from error
        for server, cpus in zip((plain, *pairs), cycle(reversed(halves())), strict=False):
            pin(server, cpus)
        setups = [Setup(FLOOR, "floor", plain)]
        for number, name in enumerate(named):
            pair = pairs[2 * number : 2 * number + 2]
            setups.append(Sequential(name, "ours" if name == OURS else "peer", pool, *pair))
            if name == OURS:
                setups.append(Concurrent(f"{OURS} concurrent", "ours", pool, *pair))
        try:
            yield setups
        finally:
            # A stopped process doesn't see that it is to end.
            for setup in setups:
                setup.resume()


def _available() -> int:
    """Bytes of memory that this machine has left."""
    fields = Path("/proc/meminfo").read_text().split()
    return 1024 * int(fields[fields.index("MemAvailable:") + 1])


def _fabric(role: str) -> Spec:
    return Spec(f"fabric-{role}", (*_SETTINGS, *servers.kv_transfer(role)), ONE_PROCESS)


def _nixl(role: str) -> Spec:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    # vLLM hangs where this port is taken, so it isn't one of the range that servers share.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **ONE_PROCESS,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    arguments = (*_SETTINGS, "--kv-transfer-config", json.dumps(config))
    return Spec(f"nixl-{role}", arguments, environment)


_VERSIONS = """
import json
from importlib import metadata, util
found = {"vllm": metadata.version("vllm")}
if util.find_spec("nixl"):
    import nixl._api
    found["nixl"] = metadata.version("nixl")
print(json.dumps(found))
"""


def versions() -> dict[str, str]:
    """Of vLLM and NIXL in the servers' environment; NIXL may be missing.

    Raises:
        ContenderError: NIXL can't be imported, or there is no vLLM.
    """
    command = [str(servers.PYTHON), "-c", _VERSIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise ContenderError(f"{servers.PYTHON} can't serve: {' '.join(reason)}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def absent(found: Sequence[str]) -> list[Absent]:
    """NIXL, if it isn't among the packages found."""
    if NIXL in found:
        return []
    obtain = f"uv pip install --no-deps --python {servers.PYTHON} nixl nixl-cu13"
    return [Absent(contender=NIXL, reason=f"{servers.PYTHON} has no nixl", obtain=obtain)]


def block_bytes() -> int:
    """Bytes of a block of the tiny model, all layers."""
    config = json.loads((servers.tiny_model() / "config.json").read_text())
    values = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(BLOCK * config["num_hidden_layers"] * values * 4)
