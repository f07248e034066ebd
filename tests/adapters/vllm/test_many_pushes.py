"""Many weight updates of a real server that answers all the time, some by trainers that are killed.

``FABRIC_RAY_PUSHES`` is their number: 16 by default, 100 in ``make test-all``.
``FABRIC_RAY_PUSHES_SEED`` draws the kills."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.servers import Server
from tests.adapters.vllm.test_weights import (
    NEW,
    OLD,
    OLD_PROMPTS,
    ShardedTrainers,
    Stand,
    answers,
    sharded_trainers,
    standing,
)

pytestmark = servers.needed

PUSHES = int(os.environ.get("FABRIC_RAY_PUSHES", "16"))
SEED = int(os.environ.get("FABRIC_RAY_PUSHES_SEED", "1"))
KILLED = 0.2
CLIENTS = 4
ASKED = 24
"""Number of tokens that the load asks for."""


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
            found.append((number, self._server.tokens(OLD_PROMPTS[number], ASKED)))
        return found

    def end(self) -> list[tuple[int, list[int]]]:
        """Numbers of prompts, and what they were answered."""
        self._over.set()
        return [each for client in self._clients for each in client.result()]

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()


def push_until_killed(
    stand: Stand, drawn: random.Random, trainers: ShardedTrainers, left: int
) -> tuple[int, bool]:
    """Pushes until a rank is killed; how many pushes are left then, and whether the kill met a
    push."""
    seconds = trainers.send(OLD)["seconds"]
    assert stand.right(OLD) == len(OLD_PROMPTS)
    version = NEW
    while left:
        left -= 1
        if drawn.random() >= KILLED:
            assert trainers.send(version)["error"] is None
            assert stand.right(version) == len(OLD_PROMPTS)
            version = OLD if version == NEW else NEW
            continue
        dies = drawn.randrange(2)
        trainers.begin(version, dies=dies, at=drawn.uniform(0.1, 1.0) * seconds)
        error = trainers.end(dies=dies)["error"]
        assert serves_one_version(stand)
        return left, error is not None
    return left, False


def serves_one_version(stand: Stand) -> bool:
    """Whether all answers are of one version, once no call of a killed rank is under way."""
    deadline = time.monotonic() + 60.0
    while True:
        # It may stand paused, also by a call that the killed rank had made.
        stand.server.post("/resume")
        if answers(stand.server) in stand.expected.values():
            return True
        if time.monotonic() > deadline:
            return False


@pytest.mark.timeout(300 + 30 * PUSHES)
def test_rs_3_no_token_of_many_pushes_is_wrong(stand: Stand) -> None:
    drawn, left, hits = random.Random(SEED), PUSHES, 0
    load = Load(stand.server)
    try:
        while left:
            with sharded_trainers(stand.server, workers=1) as trainers:
                left, met = push_until_killed(stand, drawn, trainers, left)
                hits += met
        found = load.end()
    finally:
        load.close()
    with sharded_trainers(stand.server, workers=1) as trainers:
        assert trainers.send(OLD)["error"] is None
    both = stand.server, stand.plain
    whole = [[server.tokens(prompt, ASKED) for server in both] for prompt in OLD_PROMPTS]
    crossed = [(number, answer) for number, answer in found if answer not in whole[number]]
    print(f"\n{len(found)} answers, {len(crossed)} by two versions; {hits} pushes lost a rank")
    assert hits > 0
    assert crossed
    for number, answer in crossed:
        check_tokens(both, OLD_PROMPTS[number], answer)


def check_tokens(both: Sequence[Server], prompt: list[int], answer: list[int]) -> None:
    """Of an answer that went on with the next version, each token is the one that either version
    gives after all before it."""
    for i, token in enumerate(answer):
        given = [server.tokens(prompt + answer[:i], 1) for server in both]
        assert [token] in given, f"token {i} of {answer}, after {prompt}"
