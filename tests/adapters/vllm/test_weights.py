"""Weight updates of real servers, as the page on vLLM says: every output is that of a plain server
of one version."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import Process, Server, Spec, plugin_path, tiny_model

pytestmark = servers.needed

OLD, NEW = 1, 2
BLOCKS = ("--block-size", "32")
BACKEND = ("--weight-transfer-config", '{"backend": "fabric"}')
TOKENS, LONG = 12, 1200
HERE = Path(__file__).parent


class Trainer(Process):
    """Streams whole tensors; see ``trainer.py``."""

    def __init__(self, server: Server, options: dict[str, Any]) -> None:
        log = server.log.with_suffix(".trainer")
        command = (servers.PYTHON, HERE / "trainer.py", server.url, json.dumps(options))
        super().__init__(command, log)
        self._kind = server.spec.kind

    def send(
        self, seed: int, *, without: Sequence[str] = (), fail_at: str | None = None
    ) -> str | None:
        """Sends the weights of a seed; the error if there is one."""
        checkpoint = str(tiny_model(seed, self._kind))
        self.say({"checkpoint": checkpoint, "without": list(without), "fail_at": fail_at})
        answer: str | None = self.hear()
        return answer


class ShardedTrainers:
    """Two ranks of FSDP2; see ``sharded_trainer.py``."""

    RANKS = 2

    def __init__(
        self,
        *reached: Server,
        program: str = "sharded_trainer.py",
        python: Path = servers.PYTHON,
        path: str = str(servers.ROOT),
        **options: Any,
    ) -> None:
        ranks, server = (str(self.RANKS), str(servers.free_port())), reached[0]
        urls = ",".join(each.url for each in reached)
        self._kind = server.spec.kind
        self._ranks = [
            Process(
                (python, HERE / program, urls, json.dumps(options), str(rank), *ranks),
                server.log.with_suffix(f".trainer{rank}"),
                path,
            )
            for rank in range(self.RANKS)
        ]

    def begin(self, seed: int, *, dies: int | None = None, at: str | float = "write") -> None:
        """Begins a push of the weights of a seed, in which a rank may be killed at a moment."""
        checkpoint = str(tiny_model(seed, self._kind))
        for i, rank in enumerate(self._ranks):
            rank.say({"checkpoint": checkpoint, "dies": at if i == dies else None})
        for rank in self._ranks:
            assert rank.hear() is None

    def end(self, *, dies: int | None = None) -> dict[str, Any]:
        """What the first rank that lives says of the push."""
        answers = [rank.hear() for i, rank in enumerate(self._ranks) if i != dies]
        assert len({answer["error"] is None for answer in answers}) == 1
        first: dict[str, Any] = answers[0]
        return first

    def send(self, seed: int) -> dict[str, Any]:
        """Pushes the weights of a seed; what rank 0 says."""
        self.begin(seed)
        return self.end()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@contextmanager
def sharded_trainers(*reached: Server, **options: Any) -> Iterator[ShardedTrainers]:
    made = ShardedTrainers(*reached, **options)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def trainer(server: Server, **options: Any) -> Iterator[Trainer]:
    made = Trainer(server, options)
    try:
        yield made
    finally:
        made.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(4, 2048) for _ in range(70)] for _ in range(count)]


OLD_PROMPTS, RUNNING = prompts(30, 0), prompts(3, 1)


@dataclass
class Stand:
    server: Server
    """Begins with the old weights."""
    plain: Server
    """Has the new weights, and no routes for updates."""
    expected: dict[int, list[list[int]]]
    """By version."""

    def right(self, version: int) -> int:
        """How many old prompts the server answers with a version."""
        found = answers(self.server)
        return sum(a == b for a, b in zip(found, self.expected[version], strict=True))

    def ask_running(self, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
        """Long requests, all of which the server computes now. They are asked once more if it was
        done with them before a look at it was answered."""
        deadline = time.monotonic() + 120
        while True:
            asked = [pool.submit(self.server.complete, prompt, LONG) for prompt in RUNNING]
            while not any(future.done() for future in asked):
                if self.server.metric("vllm:num_requests_running") == len(asked):
                    return asked
                assert time.monotonic() < deadline, self.server.tail()
                time.sleep(0.05)
            for future in asked:
                future.result()
            assert time.monotonic() < deadline, self.server.tail()

    def is_paused(self) -> bool:
        return bool(json.loads(self.server.get("/is_paused"))["is_paused"])


def answers(server: Server) -> list[list[int]]:
    """To the old prompts."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: server.tokens(prompt, TOKENS), OLD_PROMPTS))


@contextmanager
def standing(kind: str, *arguments: str, both: bool = False) -> Iterator[Stand]:
    """Two servers of a kind of model.

    Args:
        arguments: more of them, for the one that is updated.
        both: whether the plain one can be updated, too.
    """
    with plugin_path() as path:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
        updated = Spec("updated", (*BLOCKS, *BACKEND, *arguments), environment, OLD, kind)
        plain = Spec("plain", BLOCKS, seed=NEW, kind=kind)
        if both:
            plain = replace(plain, arguments=(*BLOCKS, *BACKEND), environment=environment)
        with servers.running(updated, plain) as pair:
            yield stand_of(*pair)


def stand_of(server: Server, plain: Server) -> Stand:
    expected = {OLD: answers(server), NEW: answers(plain)}
    assert all(a != b for a, b in zip(expected[OLD], expected[NEW], strict=True))
    return Stand(server, plain, expected)


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing("llama") as made:
        yield made


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_rs_3_after_one_call_old_prompts_are_answered_by_the_new_weights_while_requests_run(
    stand: Stand, pause: str
) -> None:
    with trainer(stand.server, pause=pause) as sender, ThreadPoolExecutor(8) as pool:
        assert [sender.send(version) for version in (NEW, OLD)] == [None, None]
        assert stand.right(OLD) == 30
        alone = [stand.server.tokens(prompt, LONG) for prompt in RUNNING]
        running = stand.ask_running(pool)
        assert sender.send(NEW) is None
        assert stand.right(NEW) == 30
        for prompt, old, future in zip(RUNNING, alone, running, strict=True):
            [choice] = future.result()["choices"]
            got = choice["token_ids"]
            same = next((i for i, (a, b) in enumerate(zip(got, old, strict=False)) if a != b), None)
            if pause == "abort":
                assert (choice["finish_reason"], same) == ("abort", None)
                continue
            assert same is not None, "it was over before the update"
            assert stand.plain.tokens(prompt + got[:same], LONG - same) == got[same:]


def test_rs_3_refused_updates_leave_the_server_serving_the_old_version(stand: Stand) -> None:
    with trainer(stand.server) as sender:
        assert sender.send(OLD) is None
        refused = sender.send(NEW, fail_at="model.layers.3.mlp.up_proj.weight")
        assert "can't be gathered" in str(refused)
        assert stand.right(OLD) == 30
    with trainer(stand.server, workers=2, timeout=2.0) as sender:
        assert "1 of 2 workers of vLLM are ready" in str(sender.send(NEW))
        assert stand.right(OLD) == 30
    with trainer(stand.plain) as sender:
        assert "start it with VLLM_SERVER_DEV_MODE=1" in str(sender.send(NEW))


def test_rs_3_a_server_with_parts_of_two_versions_stays_paused_until_it_has_one(
    stand: Stand,
) -> None:
    with trainer(stand.server, bucket=1 << 20) as sender:
        late = sender.send(NEW, fail_at="model.layers.3.mlp.up_proj.weight")
        assert "vLLM stays paused" in str(late)
        assert stand.is_paused()
        assert sender.send(NEW, fail_at="model.embed_tokens.weight") is not None
        assert stand.is_paused()
        assert sender.send(OLD) is None
        assert stand.right(OLD) == 30
        lacks = sender.send(NEW, without=["model.layers.1.self_attn.k_proj.weight"])
        assert "lack tensors of the update: model.layers.1.self_attn.qkv_proj" in str(lacks)
        assert stand.is_paused()
        assert sender.send(NEW) is None
        assert stand.right(NEW) == 30


def test_a_push_through_running_requests_does_not_end_the_server(stand: Stand) -> None:
    with (
        trainer(stand.server, unpaused=True, bucket=1 << 20) as sender,
        ThreadPoolExecutor(8) as pool,
    ):
        running = [pool.submit(stand.server.complete, prompt, LONG) for prompt in RUNNING]
        for version in (NEW, OLD, NEW):
            assert sender.send(version) is None
        assert [f.result()["choices"][0]["finish_reason"] for f in running] == ["length"] * 3
    with trainer(stand.server) as sender:
        assert sender.send(OLD) is None
    assert stand.right(OLD) == 30


def push_while_requests_run(
    stand: Stand, trainers: ShardedTrainers, pool: ThreadPoolExecutor, *versions: int
) -> None:
    """After each push every old prompt is answered by its version, and what ran goes on (RS-3)."""
    for version in versions:
        running = stand.ask_running(pool)
        assert trainers.send(version)["error"] is None
        assert stand.right(version) == 30
        for future in running:
            assert len(future.result()["choices"][0]["token_ids"]) == LONG


def test_rs_3_two_fsdp2_ranks_push_shards_twice_while_requests_run(stand: Stand) -> None:
    with sharded_trainers(stand.server) as trainers, ThreadPoolExecutor(8) as pool:
        push_while_requests_run(stand, trainers, pool, OLD, NEW)
        answer = trainers.send(OLD)
        [checkpoint] = tiny_model(OLD).glob("*.safetensors")
        assert answer["bytes"] == pytest.approx(checkpoint.stat().st_size, rel=0.01), "each once"
        assert stand.right(OLD) == 30
