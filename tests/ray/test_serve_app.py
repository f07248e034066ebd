"""A real Serve application over HTTP: a router, prefillers and a decoder, each a process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.serve import LocalApp, ServeArgs, run_local
from fabric_ray.serve.instance import load_model, tokenizer
from tests.integration import own_engine
from tests.ports import free_ports
from tests.processes import within

# Each replica is a process that imports torch; test_serve_loops.py has the same without.
pytestmark = pytest.mark.long

TOKEN = "0f" * 32
TEMPLATE = Path(__file__).parents[2] / "examples/serve/chat.jinja"
ARGS = ServeArgs.model_validate(
    {
        "torch_threads": 1,
        "chat_template": str(TEMPLATE),
        "prefill": {
            "chunk_tokens": 16,
            "options": {
                "num_replicas": 1,
                # Serve gives up a replica that misses three checks in a row.
                "health_check_period_s": 1.0,
                "health_check_timeout_s": 4.0,
                "graceful_shutdown_timeout_s": 1.0,
            },
        },
        "decode": {"max_running": 8, "max_queue": 24, "prefill_timeout": 60},
        "router": {"max_requests": 24, "max_body": 1 << 16},
        "terms": {"beat": 0.2, "silence": 5.0},
        "fabric": {"token": TOKEN},
    }
)


@pytest.fixture(scope="module")
def app(cluster: list[str]) -> Iterator[LocalApp]:
    try:
        with run_local(ARGS, port=free_ports()[0]) as app:
            yield app
    finally:
        serve.shutdown()


def of_role(app: LocalApp, role: str) -> list[dict[str, Any]]:
    return [replica for replica in app.stats() if replica["role"] == role]


def wait_idle(app: LocalApp, seconds: float = 20) -> list[dict[str, Any]]:
    """Until no page is taken anywhere; fails if that doesn't come."""
    deadline = time.monotonic() + seconds
    while True:
        every = [*of_role(app, "prefill"), *of_role(app, "decode")]
        taken = [r for r in every if not r["idle"] or r.get("taken_slots") or r.get("pulls")]
        if every and not taken:
            return every
        assert time.monotonic() < deadline, f"still taken: {taken}"
        time.sleep(0.1)


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randint(4, 90))] for _ in range(count)]


def expected(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What one engine says that does both halves."""
    plain, stop = Generator(TorchEngine(load_model(ARGS, tp=1))), tokenizer(ARGS).stop
    return plain.run([GenerationRequest(p, max_tokens, stop=stop) for p in prompts])


def complete(app: LocalApp, prompt: list[int], max_tokens: int) -> list[int] | dict[str, Any]:
    """The tokens, or the error."""
    try:
        answer = app.complete(prompt, max_tokens=max_tokens, temperature=0, return_token_ids=True)
    except urllib.error.HTTPError as error:
        found: dict[str, Any] = json.load(error)["error"]
        return found | {"status": error.code, "retry": error.headers["Retry-After"]}
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def stream(app: LocalApp, **fields: Any) -> tuple[http.client.HTTPConnection, Any]:
    connection = http.client.HTTPConnection(app.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"stream": True, **fields}))
    return connection, connection.getresponse()


def test_tokens_over_http_equal_those_of_one_engine(app: LocalApp) -> None:
    asked = prompts(12, seed=1)
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda prompt: complete(app, prompt, 12), asked))
    assert got == expected(asked, 12)
    wait_idle(app)


def test_the_token_reaches_the_replicas_as_it_is(app: LocalApp) -> None:
    details: Any = _get_global_client().get_serve_details()
    args = details["applications"][app.name]["deployed_app_config"]["args"]
    assert args["fabric"]["token"] == TOKEN
    assert TOKEN not in repr(ARGS) + ARGS.model_dump_json()


def test_a_stream_is_events_that_end_with_done(app: LocalApp) -> None:
    fields = {"prompt": "the pages of a prompt", "max_tokens": 12, "temperature": 0}
    whole = app.complete(**fields)
    connection, response = stream(app, **fields, stream_options={"include_usage": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in response.read().decode().split("\n\n") if line]
    connection.close()
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    usage = {k: v for k, v in chunks[-1]["usage"].items() if k != "prompt_tokens_details"}
    assert usage == {k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"}
    assert chunks[-1]["x-fabric"]["first_token"] > 0


CHAT: dict[str, Any] = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "the pages of a prompt"}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(app: LocalApp) -> Iterator[Any]:
    """OpenAI's own."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_chats(client: Any) -> None:
    words = tokenizer(ARGS)
    prompt = words.encode("user: the pages of a prompt\nassistant:", special=False)
    (tokens,) = expected([prompt], 12)
    text = words.decode([token for token in tokens if token not in words.stop])
    whole = client.chat.completions.create(**CHAT)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == ("stop" if tokens[-1] in words.stop else "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), len(tokens))

    options = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**CHAT, **options, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], len(tokens))
    # The answer goes back as a part of the next question.
    more = [*CHAT["messages"], choice.message, {"role": "user", "content": "and then?"}]
    assert client.chat.completions.create(**CHAT | {"messages": more}).usage.completion_tokens


def test_openais_client_completes_and_lists_the_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    fields = {"model": "tiny-llama", "prompt": "the pages", "max_tokens": 6, "temperature": 0}
    chunks = client.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == client.completions.create(**fields).choices[0].text


def test_openais_client_is_told_the_field(client: Any) -> None:
    import openai

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    for param, fields in {
        "messages": {"messages": [{"role": "user", "content": [image]}]},
        "presence_penalty": {"presence_penalty": 1},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**CHAT | fields)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**CHAT | {"model": "gpt"})


def test_the_id_that_a_client_gives_is_that_of_its_answer(client: Any) -> None:
    asked = client.chat.completions.with_raw_response.create
    raw = asked(**CHAT, extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "chatcmpl-mine-1"


def test_an_engine_of_ones_own_is_served_from_a_file(app: LocalApp, tmp_path: Path) -> None:
    shutil.copy(own_engine.__file__, tmp_path / "my_engine.py")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    own = {
        "name": "own",
        "route_prefix": "/own",
        "import_path": "fabric_ray.serve:build_app",
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        "args": {"model": "sums", "engine": "my_engine:make", "fabric": {"token": TOKEN}},
    }
    serving: Any = _get_global_client()
    beside = serving.get_serve_details()["applications"][app.name]["deployed_app_config"]
    serving.deploy_apps(ServeDeploySchema.model_validate({"applications": [beside, own]}))
    try:
        within(120, "it runs", lambda: status_of("own") == "RUNNING")
        app.scale("Prefill", 1)
        assert status_of("own") == "RUNNING"
        for prompt in prompts(4, seed=41):
            connection = http.client.HTTPConnection(app.url.removeprefix("http://"), timeout=60)
            fields = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            connection.request("POST", "/own/v1/completions", json.dumps(fields))
            (choice,) = json.load(connection.getresponse())["choices"]
            connection.close()
            assert choice["token_ids"] == own_engine.expected(prompt, 8)
    finally:
        serving.deploy_apps(ServeDeploySchema.model_validate({"applications": [beside]}))


def status_of(name: str) -> str:
    application = serve.status().applications.get(name)
    assert application is None or application.status != "DEPLOY_FAILED", application
    return application.status.value if application else ""


def test_a_client_that_hangs_up_frees_its_pages(app: LocalApp) -> None:
    before = sum(replica["cancelled"] for replica in of_role(app, "decode"))
    connection, response = stream(app, prompt="on and on", max_tokens=4000, seed=1)
    assert response.readline().startswith(b"data: ")
    assert not of_role(app, "decode")[0]["idle"]
    response.close()
    connection.close()
    after = wait_idle(app)
    assert sum(replica.get("cancelled", 0) for replica in after) == before + 1


def test_too_many_requests_are_turned_away_and_told_when_to_return(app: LocalApp) -> None:
    asked = prompts(40, seed=2)
    with ThreadPoolExecutor(40) as pool:
        got = list(pool.map(lambda prompt: complete(app, prompt, 12), asked))
    refused = [answer for answer in got if isinstance(answer, dict)]
    assert refused
    assert {(answer["status"], answer["retry"]) for answer in refused} == {(429, "1")}
    wanted = expected(asked, 12)
    assert [(g, w) for g, w in zip(got, wanted, strict=True) if g != w and g not in refused] == []
    wait_idle(app)


def test_what_is_wrong_is_said_as_openai_says_it(app: LocalApp) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        app.complete("x", model="gpt")
    assert caught.value.code == 404
    assert json.load(caught.value)["error"]["param"] == "model"
    with pytest.raises(urllib.error.HTTPError) as caught:
        app.complete("x", n=2)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_is_not_read(app: LocalApp) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        app.complete("x" * (1 << 16))
    assert caught.value.code == 413
    assert "router.max_body" in json.load(caught.value)["error"]["message"]


def test_connections_that_send_no_body_keep_no_request_out(app: LocalApp) -> None:
    address = app.url.removeprefix("http://")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: 9\r\n\r\n{{"
    most, refused = ARGS.router.max_requests, router_count(app, "body_timeouts")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * most):
            idle = stack.enter_context(socket.create_connection(address.split(":"), 30))
            idle.sendall(head.encode())
        within(30, "reading", lambda: router_count(app, "body_timeouts") == refused + most)
        assert router_count(app, "reading") == most
        assert router_count(app, "open") == 0
        (prompt,) = prompts(1, seed=8)
        assert complete(app, prompt, 4) == expected([prompt], 4)[0]
        assert health(app) == 200
    within(30, "forgetting", lambda: router_count(app, "reading") == 0)


def test_health_fails_while_no_request_can_be_taken(app: LocalApp) -> None:
    with ThreadPoolExecutor(ARGS.router.max_requests) as pool:
        asked = prompts(ARGS.router.max_requests, seed=9)
        answers = [pool.submit(complete, app, prompt, 200) for prompt in asked]
        within(30, "all slots", lambda: router_count(app, "open") == ARGS.router.max_requests)
        assert health(app) == 503
        got = [answer.result() for answer in answers]
    assert [answer for answer in got if isinstance(answer, dict)] == []
    assert health(app) == 200
    wait_idle(app)


def router_count(app: LocalApp, name: str) -> int:
    return sum(replica[name] for replica in of_role(app, "router"))


def health(app: LocalApp) -> int:
    connection = http.client.HTTPConnection(app.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


def test_prefillers_are_added_while_all_others_go_on(app: LocalApp) -> None:
    before = {replica["pid"] for replica in app.stats()}
    app.scale("Prefill", 2)
    app.wait_running()
    asked = prompts(12, seed=5)
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda prompt: complete(app, prompt, 8), asked))
    assert got == expected(asked, 8)
    assert before < {replica["pid"] for replica in app.stats()}
    assert all(replica["computed_prompts"] for replica in of_role(app, "prefill"))


def test_a_prefiller_that_is_killed_under_load_costs_no_request(app: LocalApp) -> None:
    """RS-4, RS-1: its prompts are computed by the other; none of their tokens is wrong."""
    app.scale("Prefill", 2)
    within(60, "two prefillers", lambda: len(of_role(app, "prefill")) == 2)
    asked = prompts(28, seed=3)
    victim = of_role(app, "prefill")[0]["pid"]
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(complete, app, prompt, 8) for prompt in asked]
        while sum(answer.done() for answer in answers) < 8:
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        got = [answer.result() for answer in answers]
    assert got == expected(asked, 8)
    assert victim not in {replica["pid"] for replica in wait_idle(app)}


def test_a_prefiller_that_is_stopped_under_load_costs_no_request(app: LocalApp) -> None:
    """RS-4, RS-1: one that stands still, and may write what it has begun when it goes on."""
    app.scale("Prefill", 2)
    within(60, "two prefillers", lambda: len(of_role(app, "prefill")) == 2)
    asked = prompts(28, seed=6)
    victim, other = (replica["pid"] for replica in of_role(app, "prefill"))
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(complete, app, prompt, 8) for prompt in asked]
        while sum(answer.done() for answer in answers) < 8:
            time.sleep(0.01)
        os.kill(victim, signal.SIGSTOP)
        try:
            # Long before Serve gives it up, all other replicas are listed.
            there = ({replica["pid"] for replica in of_role(app, "prefill")} for _ in range(3))
            assert any(pids == {other} for pids in there)
            got = [answer.result() for answer in answers]
            app.wait_healthy()
        finally:
            with contextlib.suppress(ProcessLookupError):  # Serve may have ended it
                os.kill(victim, signal.SIGCONT)
    assert got == expected(asked, 8)
    wait_idle(app, 60)


def test_a_prefiller_that_fails_its_health_checks_is_replaced(app: LocalApp) -> None:
    within(60, "a prefiller", lambda: of_role(app, "prefill"))
    before = {replica["pid"] for replica in of_role(app, "prefill")}
    victim = min(before)
    os.kill(victim, signal.SIGSTOP)
    try:
        within(90, "another prefiller", lambda: fresh(app, before))
        (asked,) = prompts(1, seed=31)
        within(60, "its answer", lambda: [complete(app, asked, 8)] == expected([asked], 8))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def fresh(app: LocalApp, before: set[int]) -> bool:
    return {replica["pid"] for replica in of_role(app, "prefill")} - before != set()


def test_a_decoder_that_is_killed_is_replaced_and_prefillers_free_its_pages(
    app: LocalApp,
) -> None:
    connection, response = stream(app, prompt="to the end", max_tokens=4000, seed=2)
    assert response.readline().startswith(b"data: ")
    os.kill(of_role(app, "decode")[0]["pid"], signal.SIGKILL)
    rest = response.read().decode()
    connection.close()
    assert '"code":"decoder_lost"' in rest
    assert "[DONE]" not in rest
    app.wait_healthy()
    (prompt,) = prompts(1, seed=4)
    assert [complete(app, prompt, 8)] == expected([prompt], 8)
    wait_idle(app)
