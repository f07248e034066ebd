"""Weight updates of real servers of a model with experts, one with two workers: every output is a
plain server's of one version, whatever dies at whatever moment."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import Server
from tests.adapters.vllm.test_weights import (
    NEW,
    OLD,
    Stand,
    answers,
    sharded_trainers,
    standing,
    trainer,
)

pytestmark = servers.needed

WORKERS = 2


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    ranks = "--tensor-parallel-size", str(WORKERS)
    with standing("qwen3_moe", *ranks, both=True) as made:
        yield made


def served(stand: Stand) -> int:
    """The version of which a server gives all answers; it may stand paused."""
    if stand.is_paused():
        stand.server.post("/resume")
    found = answers(stand.server)
    [version] = [each for each, expected in stand.expected.items() if expected == found]
    return version


def test_rs_1_experts_answer_with_the_version_that_was_pushed(stand: Stand) -> None:
    with trainer(stand.server, workers=WORKERS) as sender:
        assert sender.send(NEW) is None
        assert stand.right(NEW) == 30
    with sharded_trainers(stand.server, workers=WORKERS) as trainers:
        for version in (OLD, NEW):
            assert trainers.send(version)["error"] is None
            assert stand.right(version) == 30


@pytest.mark.parametrize(
    ("dies", "at", "serves"),
    [
        (1, "write", {OLD}),
        (0, "start", {OLD}),
        (0, "flip", {NEW}),
        (0, None, {OLD, NEW}),
        (1, None, {OLD, NEW}),
    ],
)
def test_rs_3_a_trainer_that_is_killed_leaves_all_workers_with_one_version(
    stand: Stand, dies: int, at: str | None, serves: set[int]
) -> None:
    with sharded_trainers(stand.server, workers=WORKERS) as trainers:
        first = trainers.send(OLD)
        assert first["error"] is None, "after the trainers of the case before have died"
        moment = at or random.uniform(0.0, 1.2 * first["seconds"])
        trainers.begin(NEW, dies=dies, at=moment)
        trainers.end(dies=dies)
    assert served(stand) in serves, f"rank {dies} was killed at {moment}"


def test_rs_3_a_server_that_is_killed_leaves_the_others_with_one_version(stand: Stand) -> None:
    with sharded_trainers(stand.server, stand.plain, workers=WORKERS + 1) as trainers:
        first = trainers.send(OLD)
        assert first["error"] is None
        assert answers(stand.plain) == stand.expected[OLD]
        moment = random.uniform(0.0, 1.2 * first["seconds"])
        trainers.begin(NEW)
        time.sleep(moment)
        stand.plain.kill()
        error = trainers.end()["error"]
    version = served(stand)
    assert version == NEW if error is None else version in stand.expected, (moment, error)
    with sharded_trainers(stand.server, workers=WORKERS) as trainers:
        for version in (OLD, NEW):
            assert trainers.send(version)["error"] is None
            assert stand.right(version) == 30


def test_rs_3_a_worker_that_is_killed_ends_its_server_and_no_trainer_waits(stand: Stand) -> None:
    with sharded_trainers(stand.server, workers=WORKERS, timeout=30.0) as trainers:
        first = trainers.send(OLD)
        assert first["error"] is None
        moment = random.uniform(0.0, 1.2 * first["seconds"])
        trainers.begin(NEW)
        time.sleep(moment)
        kill_worker(stand.server)
        error = trainers.end()["error"]
    stand.server.process.wait(120.0)
    if error is None:
        assert moment > 0.5 * first["seconds"], "the push was over before"


def kill_worker(server: Server) -> None:
    """Kills one of the processes that hold its model."""
    workers = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if child.cmdline()[:1] and child.cmdline()[0].startswith("VLLM::Worker")
    ]
    assert len(workers) == WORKERS
    random.choice(workers).kill()
