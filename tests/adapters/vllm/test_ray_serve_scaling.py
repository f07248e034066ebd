"""Ray Serve LLM's own autoscaling over a connector that binds requests to prefill replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.adapters.vllm import serve_llm, servers
from tests.adapters.vllm.serve_llm import App, ask_all, expected_of, prompts_of
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serve_llm.running("--prefill-up-to", "2") as app:
        yield app


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with servers.running(Spec("plain")) as (server,):
        yield server


def test_prefill_follows_its_queue_and_every_answer_is_right(app: App, plain: Server) -> None:
    prompts = [prompt for seed in (8, 9) for prompt in prompts_of(seed)]
    expected = expected_of(plain, prompts)

    def asks_until(count: int, ask: Callable[[], None]) -> None:
        deadline = time.monotonic() + servers.START
        while len(app.replicas("Prefill")) != count:
            assert time.monotonic() < deadline, app.tail()
            ask()

    def many() -> None:
        assert ask_all(app, prompts, at_once=16) == expected

    def one() -> None:
        assert app.complete(prompts[0]) == expected[0]
        time.sleep(1)

    assert len(app.replicas("Prefill")) == 1
    asks_until(2, many)
    many()  # with what has begun to serve meanwhile
    asks_until(1, one)
    many()
