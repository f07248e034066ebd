"""Ray Serve LLM with real vLLM engines, two on each side: examples/serve_llm."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adapters.vllm import serve_llm, servers
from tests.adapters.vllm.serve_llm import App, ask_all, expected_of, prompts_of
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serve_llm.running("--prefill", "2", "--decode", "2") as app:
        yield app


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with servers.running(Spec("plain")) as (server,):
        yield server


def test_any_pair_of_replicas_answers_as_a_plain_server(app: App, plain: Server) -> None:
    assert [len(app.replicas(side)) for side in ("Prefill", "Decode")] == [2, 2]
    prompts = [prompt for seed in (5, 6) for prompt in prompts_of(seed)]
    expected = expected_of(plain, prompts)
    for _ in range(2):  # the second time with hits on either side
        assert ask_all(app, prompts) == expected


def test_rs_4_requests_are_answered_by_the_replica_that_is_left(app: App, plain: Server) -> None:
    """What was under way at the killed one ends in an error or in the right tokens."""
    prompts = prompts_of(7)
    expected = expected_of(plain, prompts)

    def ask(prompt: list[int]) -> tuple[str | None, float]:
        begin = time.monotonic()
        try:
            return app.complete(prompt), 0.0
        except urllib.error.HTTPError:
            return None, time.monotonic() - begin

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        replica = app.replicas("Prefill")[0]
        for process in [*replica.children(recursive=True), replica]:
            process.kill()
        answers = [each.result() for each in asked]
    assert all(text in (None, right) for (text, _), right in zip(answers, expected, strict=True))
    # The other replica serves while a successor of the killed one starts, which takes a minute.
    deadline = time.monotonic() + servers.START
    for prompt, right in zip(prompts, expected, strict=True):
        while (text := ask(prompt)[0]) is None:
            assert time.monotonic() < deadline, app.tail()
            time.sleep(0.5)
        assert text == right
