"""Many weight updates of a real server that answers all the time, some by trainers that are killed.

``FABRIC_RAY_PUSHES`` is their number: 16 by default, 100 in ``make test-all``.
``FABRIC_RAY_PUSHES_SEED`` draws the kills."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import Server
from tests.adapters.vllm.test_expert_weights import served
from tests.adapters.vllm.test_weights import (
    NEW,
    OLD,
    OLD_PROMPTS,
    TOKENS,
    ShardedTrainers,
    Stand,
    sharded_trainers,
    standing,
)

pytestmark = servers.needed

PUSHES = int(os.environ.get("FABRIC_RAY_PUSHES", "16"))
SEED = int(os.environ.get("FABRIC_RAY_PUSHES_SEED", "1"))
KILLED = 0.2
CLIENTS = 4


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing("llama") as made:
        yield made


class Load:
    """Clients that ask old prompts, one after the other, and keep all answers."""

    def __init__(self, server: Server) -> None:
        self._server, self._over = server, threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._ask, client) for client in range(CLIENTS)]

    def _ask(self, client: int) -> list[tuple[int, list[int]]]:
        drawn, found = random.Random(SEED + client), []
        while not self._over.is_set():
            number = drawn.randrange(len(OLD_PROMPTS))
            found.append((number, self._server.tokens(OLD_PROMPTS[number], TOKENS)))
        return found

    def end(self) -> list[tuple[int, list[int]]]:
        """Numbers of prompts, and what they were answered."""
        self._over.set()
        return [each for client in self._clients for each in client.result()]

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()


def push_many(stand: Stand, drawn: random.Random, trainers: ShardedTrainers, left: int) -> int:
    """Pushes until a rank is killed; how many pushes are left then."""
    seconds = 1.0
    version = NEW
    while left:
        left -= 1
        if drawn.random() >= KILLED:
            said = trainers.send(version)
            assert said["error"] is None
            seconds = said["seconds"]
            assert stand.right(version) == len(OLD_PROMPTS)
            version = OLD if version == NEW else NEW
            continue
        dies, moment = drawn.randrange(2), drawn.uniform(0.0, 1.2 * seconds)
        trainers.begin(version, dies=dies, at=moment)
        trainers.end(dies=dies)
        assert served(stand) in (OLD, NEW)
        break
    return left


@pytest.mark.timeout(300 + 30 * PUSHES)
def test_rs_3_no_token_of_many_pushes_is_wrong(stand: Stand) -> None:
    drawn, load, left = random.Random(SEED), Load(stand.server), PUSHES
    try:
        while left:
            with sharded_trainers(stand.server, workers=1) as trainers:
                left = push_many(stand, drawn, trainers, left)
        found = load.end()
    finally:
        load.close()
    crossed = [each for each in found if each[1] not in by_version(stand, each[0])]
    print(f"\n{len(found)} answers, {len(crossed)} of them by two versions")
    assert len(found) - len(crossed) > PUSHES
    with sharded_trainers(stand.server, workers=1) as trainers:
        assert trainers.send(OLD)["error"] is None
    for number, answer in crossed:
        check_tokens(stand, OLD_PROMPTS[number], answer)


def by_version(stand: Stand, number: int) -> list[list[int]]:
    return [expected[number] for expected in stand.expected.values()]


def check_tokens(stand: Stand, prompt: list[int], answer: list[int]) -> None:
    """Of an answer that went on with the next version, each token is the one that either version
    gives after all before it."""
    for i, token in enumerate(answer):
        asked = prompt + answer[:i]
        given = [server.tokens(asked, 1) for server in (stand.server, stand.plain)]
        assert [token] in given, f"token {i} of {answer}, after {prompt}"
