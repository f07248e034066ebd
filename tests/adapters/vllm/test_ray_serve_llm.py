"""Ray Serve LLM with real vLLM engines, one on each side: examples/serve_llm."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from tests.adapters.vllm import serve_llm, servers
from tests.adapters.vllm.serve_llm import (
    TOKENS,
    App,
    ask_all,
    expected_of,
    external_hits,
    prompts_of,
)
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serve_llm.running() as app:
        yield app


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with servers.running(Spec("plain")) as (server,):
        yield server


def test_completions_equal_a_plain_servers_whole_and_streamed(app: App, plain: Server) -> None:
    prompts = prompts_of(1)
    expected = expected_of(plain, prompts)
    assert ask_all(app, prompts) == expected
    assert ask_all(app, prompts, stream=True) == expected
    # The decoder was given most pages, and computed few.
    deadline, wanted = time.monotonic() + 120, sum(map(len, prompts)) / 2
    while (hits := external_hits()) < wanted:
        assert time.monotonic() < deadline, f"{hits} tokens of {wanted}\n{app.tail()}"
        time.sleep(1)


def test_the_example_asks_for_a_completion_and_a_streamed_chat(app: App, plain: Server) -> None:
    script = servers.ROOT / "examples/serve_llm/ask.sh"
    said = subprocess.run(["sh", script, app.url], capture_output=True, text=True, timeout=300)
    completion, *events = said.stdout.splitlines()
    body = {"model": servers.MODEL, "max_tokens": 16, "temperature": 0}
    text = "w5 w6 w7 w8"
    wanted = plain.post("/v1/completions", {**body, "prompt": text})["choices"][0]["text"]
    assert json.loads(completion)["choices"][0]["text"] == wanted
    messages = [{"role": "user", "content": text}]
    wanted = plain.post("/v1/chat/completions", {**body, "messages": messages})["choices"][0]
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    deltas = (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"])
    assert "".join(each.get("content") or "" for each in deltas) == wanted["message"]["content"]


def test_requests_with_the_same_id_get_each_their_own_pages(app: App, plain: Server) -> None:
    prompts = prompts_of(2)
    assert ask_all(app, prompts, request_id="same") == expected_of(plain, prompts)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1, "seed": 7},
        {"min_tokens": 4},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": -1},
        {},
    ],
    ids=repr,
)
def test_rs_1_requests_of_several_passes_are_answered_as_by_a_plain_server(
    app: App, plain: Server, fields: dict[str, Any]
) -> None:
    prompts = prompts_of(4)[:3]
    for prompt in prompts if fields else [prompts]:
        expected = plain.complete(prompt, TOKENS, **fields)["choices"]
        found = json.loads(app.post(prompt, return_token_ids=True, **fields))["choices"]
        assert [each["text"] for each in found] == [each["text"] for each in expected]
        for each, other in zip(found, expected, strict=True):
            tokens = [(x["logprobs"] or {}).get("tokens") for x in (each, other)]
            assert tokens[0] == tokens[1]
            ranks = [x.get("prompt_logprobs") and len(x["prompt_logprobs"]) for x in (each, other)]
            assert ranks[0] == ranks[1]


def test_rs_4_a_killed_prefill_replica_ends_requests_and_its_successor_serves(
    app: App, plain: Server
) -> None:
    prompts = prompts_of(3)
    expected = expected_of(plain, prompts)
    replica = app.replicas("Prefill")[0]
    for process in [*replica.children(recursive=True), replica]:
        process.kill()
    answered, deadline = 0, time.monotonic() + servers.START
    while answered < len(prompts):
        assert time.monotonic() < deadline, app.tail()
        try:
            text = app.complete(prompts[answered])
        except urllib.error.HTTPError:
            time.sleep(1)
            continue
        assert text == expected[answered]
        answered += 1
