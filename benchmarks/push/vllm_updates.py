"""Whole updates of a real vLLM server from two FSDP2 ranks, by our paths and by vLLM's own.

Every turn of a method opens it, updates twice and closes it. The second update is timed. The first
shows how much memory the method takes, counted from before the opening. After each update the
server must answer as one that has loaded the same weights.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.kvcache.vllm_setups import ONE_PROCESS
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError, Failure, Family, RowHeader, make_row
from fabric_ray.bench.turns import Entry, take_turns
from tests.adapters.vllm import servers
from tests.adapters.vllm.router import random_prompt
from tests.adapters.vllm.servers import Process, Server, ServerError, Spec, tiny_model

KEY, BACKENDS_KEY = "push-vllm/update", "push-vllm/back ends"
RANKS, TOKENS = 2, 12
BACKENDS = ("nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress")
"""Those that vLLM 0.32 brings."""

_PATIENCE = 600.0
"""Seconds for a call of the trainers."""
_REFUSAL = 90.0
"""The same, where a back end is expected to fail."""
_MODEL = """
import sys
from pathlib import Path
from examples.serve_llm import tiny_model as model
model.LAYERS, model.HEADS, model.KV_HEADS, model.HEAD_DIM = int(sys.argv[3]), 16, 8, 64
model.write(Path(sys.argv[1]), int(sys.argv[2]))
"""


class UpdateMethod(NamedTuple):
    """How trainers bring weights into the server."""

    key: str
    name: str
    family: Family
    note: str


METHODS = (
    UpdateMethod("sharded", "fabric-ray sharded", "ours", "each rank writes its shards"),
    UpdateMethod("streamed", "fabric-ray streamed", "peer", "gathered, then streamed from rank 0"),
    UpdateMethod("reload", "vllm reload_weights", "peer", "gathered, a file in memory, reloaded"),
)


class Trainers:
    """Two ranks; see ``vllm_trainer.py``."""

    def __init__(self, server: Server, checkpoint: Path) -> None:
        port = str(servers.free_port())
        program = (servers.PYTHON, "-m", "benchmarks.push.vllm_trainer", server.url)
        self._ranks = [
            Process(
                (*program, str(rank), str(RANKS), port, checkpoint),
                server.log.with_suffix(f".trainer{rank}"),
            )
            for rank in range(RANKS)
        ]
        self.call("ready")

    def call(self, *what: object, limit: float = _PATIENCE) -> list[Any]:
        """What the ranks answer; an error ends them.

        Raises:
            ContenderError: a rank failed, or they took longer than ``limit`` seconds.
        """
        over, deadline = threading.Timer(limit, self.close), time.monotonic() + limit
        over.start()
        try:
            for rank in self._ranks:
                rank.say(what)
            answers = []
            for rank in self._ranks:
                answer, error = rank.hear()
                if error is not None:
                    raise ContenderError(error)
                answers.append(answer)
            return answers
        except ContenderError:
            self.close()
            raise
        except (AssertionError, OSError) as error:
            self.close()
            why = f"{what[0]} took more than {limit:g} s"
            if time.monotonic() < deadline:
                why = f"a trainer has ended: {str(error).splitlines()[-1]}"
            raise ContenderError(why) from error
        finally:
            over.cancel()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class UpdatedServer:
    """A server that gets one of two versions of its weights by each update.

    Args:
        server: has loaded the first of the checkpoints.
        expected: answers to the prompts, by checkpoint.
        prompts: what the server is asked.
        folder: for a file in memory.
    """

    def __init__(
        self,
        server: Server,
        expected: Mapping[Path, list[list[int]]],
        prompts: Sequence[list[int]],
        folder: Path,
    ) -> None:
        self._server, self._expected, self._prompts = server, expected, prompts
        self._folder, self._versions = folder, list(expected)
        self._trainers: Trainers | None = None
        self.taken: dict[str, list[dict[str, float]]] = {}

    def run(self, method: UpdateMethod) -> list[float]:
        """One turn; seconds of the second update.

        Raises:
            ContenderError: an update failed, or the server answers with other weights.
        """
        try:
            trainers = self._trainers = self._trainers or Trainers(self._server, self._versions[0])
            self._change(trainers)  # which takes more memory than an update
            self._worker("mark_memory")
            opened = max(trainers.call("open", method.key, str(self._folder)))
            first = self._update(trainers)
            worker = float(self._worker("peak_memory"))
            self._change(trainers)
            second = self._update(trainers)
            trainers.call("close")
        except (ContenderError, ServerError) as error:
            self.close()
            with suppress(ServerError):
                self._server.post("/resume")
            raise ContenderError(str(error).splitlines()[0]) from error
        memory = {"open": opened, "worker": worker, "trainer": first["peak"]}
        self.taken.setdefault(method.name, []).append({**second, **memory})
        return [second["seconds"]]

    def floor(self) -> list[float]:
        """Seconds to copy the bytes that change hands, by as many processes."""
        trainers = self._trainers = self._trainers or Trainers(self._server, self._versions[0])
        return [max(trainers.call("floor"))]

    def facts(self, method: UpdateMethod) -> dict[str, Any]:
        return {"note": method.note, "details": details(self.taken[method.name])}

    def close(self) -> None:
        if self._trainers is not None:
            self._trainers.close()
        self._trainers = None

    def _change(self, trainers: Trainers) -> None:
        self._versions.reverse()
        trainers.call("turn_to", str(self._versions[0]))

    def _update(self, trainers: Trainers) -> dict[str, float]:
        ranks: list[dict[str, float]] = trainers.call("update")
        check(answers(self._server, self._prompts), self._expected[self._versions[0]])
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def _worker(self, method: str) -> Any:
        [said] = self._server.post("/collective_rpc", {"method": method})["results"]
        return said


def check(found: Sequence[list[int]], expected: Sequence[list[int]]) -> None:
    """
    Raises:
        ContenderError: a server answers otherwise than one that has loaded the same weights.
    """
    if wrong := sum(a != b for a, b in zip(found, expected, strict=True)):
        raise ContenderError(
            f"{wrong} of {len(expected)} prompts got other tokens than from a server that has "
            "loaded the same weights"
        )


def details(taken: Sequence[Mapping[str, float]]) -> dict[str, float | str]:
    """Of all turns of a method; memory is the most of any turn."""
    paused = [turn["paused"] for turn in taken]
    spread = f"{statistics.median(paused):.2f} ({min(paused):.2f} to {max(paused):.2f})"
    return {
        "paused s": spread,
        "moved GB": taken[0]["moved"] / 1e9,
        "trainer MB": max(turn["trainer"] for turn in taken) / 1e6,
        "worker MB": max(turn["worker"] for turn in taken) / 1e6,
        "open s": statistics.median(turn["open"] for turn in taken),
    }


def measure(layers: int, turns: int, results: Results) -> None:
    """The row of all methods that run without a GPU."""
    if results.has(KEY):
        return
    with _updates(layers, results) as updates:
        entries = [
            Entry(
                name=method.name,
                family=method.family,
                run=partial(updates.run, method),
                facts=partial(updates.facts, method),
            )
            for method in METHODS
        ]
        note = {"note": "memmove of the same bytes, by as many processes"}
        floor = Entry(name="copy", family="floor", run=updates.floor, facts=lambda: note)
        take_turns(
            RowHeader(key=KEY, unit="s"),
            [*entries, floor],
            turns,
            results,
            on_turn=lambda entry, turn: results.say(f"turn {turn}: {entry.name}"),
        )
        for name, taken in updates.taken.items():
            results.say(f"{name}: {details(taken)}")


def try_backends(results: Results, refusal: Callable[[str], str] | None = None) -> None:
    """A row of why vLLM's own back ends don't run here, kept after each of them.

    Args:
        refusal: tries one, by default with a server of its own; returns the reason.
    """
    if results.has(BACKENDS_KEY):
        return
    failures: list[Failure] = []
    for backend in BACKENDS:
        results.say(f"trying {backend}")
        why = (refusal or _refusal)(backend)
        failures.append(Failure(contender=f"vllm {backend}", reason=why))
        header, complete = RowHeader(key=BACKENDS_KEY, unit="s"), backend == BACKENDS[-1]
        results.add(make_row(header, [], failures, complete=complete))


def answers(server: Server, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [server.tokens(prompt, TOKENS) for prompt in prompts]


@contextmanager
def _updates(layers: int, results: Results) -> Iterator[UpdatedServer]:
    source = random.Random(0)
    prompts = [random_prompt(source, 70) for _ in range(8)]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        TemporaryDirectory() as models,
        TemporaryDirectory(dir=memory) as folder,
        servers.plugin_path() as path,
    ):
        results.say("writing two checkpoints")
        old, new = (_checkpoint(Path(models, str(seed)), seed, layers) for seed in (1, 2))
        results.say("starting servers, which takes minutes")
        plain = Spec("plain", _SETTINGS, ONE_PROCESS, checkpoint=new)
        with servers.running(_spec("fabric", path, old), plain) as (server, other):
            expected = {old: answers(server, prompts), new: answers(other, prompts)}
            other.stop()
            updates = UpdatedServer(server, expected, prompts, Path(folder))
            try:
                yield updates
            finally:
                updates.close()


def _checkpoint(folder: Path, seed: int, layers: int) -> Path:
    subprocess.run(
        [servers.PYTHON, "-c", _MODEL, folder, str(seed), str(layers)], cwd=servers.ROOT, check=True
    )
    return folder


_NEEDED = {"sharded_rdt": ("--distributed-executor-backend", "ray")}
"""Arguments without which a server refuses a back end."""
_SETTINGS = ("--dtype", "bfloat16", "--block-size", "32")


def _spec(backend: str, path: str, checkpoint: Path) -> Spec:
    arguments = (
        *_SETTINGS,
        *("--weight-transfer-config", json.dumps({"backend": backend})),
        *("--worker-extension-cls", "benchmarks.push.memory.WorkerMemory"),
        *_NEEDED.get(backend, ()),
    )
    environment = {**ONE_PROCESS, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    return Spec(backend, arguments, environment, checkpoint=checkpoint)


def _refusal(backend: str) -> str:
    """Why an update by a back end failed, in one line."""
    try:
        with servers.running(_spec(backend, str(servers.ROOT), tiny_model())) as (server,):
            try:
                trainers = Trainers(server, tiny_model())
                trainers.call("refuse", backend, servers.free_port(), limit=_REFUSAL)
                trainers.close()
            except ContenderError as error:
                # The server's log has more errors when it is stopped.
                return reason(str(error), server.log.read_text(errors="replace"))
        return "updates without an error, and is not measured here"
    except ServerError as error:
        return reason(str(error), error.log.read_text(errors="replace"))


def reason(error: str, log: str) -> str:
    """The first error that a server's log, or else an error's text, names; in one line."""
    for line in f"{log}\n{error}".splitlines():
        found = re.search(r"\b[A-Z]\w*(?:Error|Exception): .+", line)
        if found and " WARNING " not in line:
            return found[0].strip()
    return error.splitlines()[0]
