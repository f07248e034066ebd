"""Answers as OpenAI's published client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("ray")

from fabric_ray.serve.answers import Answer
from fabric_ray.serve.messages import Emitted, Finished, Generate, Timings
from fabric_ray.serve.openai import Body, ChatBody, CompletionBody

REQUEST = Generate("id-1", (1, 2, 3), 4)
TIMES = Timings(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, cached_tokens=2, prefill_attempts=1)
PARTS = [Emitted((10,), "a"), Emitted((11,), "b")]
REST = Finished("length", (10, 11, 12), "c", TIMES)
WHOLE = Finished("stop", (10, 11, 12), "abc", TIMES)
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}

FIELDS: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
}
BOTH = pytest.mark.parametrize("kind", [CompletionBody, ChatBody])


def answer(kind: type[Body], **fields: Any) -> Answer:
    return Answer.of(kind.model_validate({**FIELDS[kind], **fields}), REQUEST, model="m")


def streamed(kind: type[Body], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of an answer, whose last event is ``[DONE]``."""
    made = answer(kind, stream=True, **fields)
    raw = made.opening() + b"".join(map(made.chunk, PARTS)) + made.last(REST)
    *events, done, empty = raw.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def usages(chunks: list[dict[str, Any]]) -> list[Any]:
    return [chunk.get("usage", "none") for chunk in chunks]


def test_a_whole_chat_has_one_message_of_the_assistant() -> None:
    found = answer(ChatBody).whole(WHOLE)
    assert (found["id"], found["object"], found["model"]) == ("id-1", "chat.completion", "m")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert found["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 2}}
    assert found["x-fabric"]["first_token"] == 0.5


def test_a_streamed_chat_says_who_speaks_then_the_text_then_why_it_ends() -> None:
    chunks = streamed(ChatBody)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * 4, "length"]
    assert usages(chunks) == ["none"] * 5
    assert chunks[-1]["x-fabric"]["total"] == 0.7


def test_a_streamed_completion_ends_with_its_last_text() -> None:
    choices = [chunk["choices"][0] for chunk in streamed(CompletionBody)]
    assert [choice["text"] for choice in choices] == ["a", "b", "c"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


@BOTH
def test_usage_comes_in_a_chunk_of_its_own(kind: type[Body]) -> None:
    *chunks, last = streamed(kind, stream_options={"include_usage": True})
    assert usages(chunks) == [None] * len(chunks)
    assert all(chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert {name: last["usage"][name] for name in USAGE} == USAGE
    assert last["x-fabric"]["total"] == 0.7


@BOTH
def test_usage_may_come_in_each_chunk(kind: type[Body]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        usage["completion_tokens"] for usage in usages(streamed(kind, stream_options=options))
    ]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3}


@BOTH
def test_tokens_are_told_if_the_client_asks(kind: type[Body]) -> None:
    parts = [chunk["choices"][0]["token_ids"] for chunk in streamed(kind, return_token_ids=True)]
    assert [token for part in parts for token in part] == [10, 11, 12]
    (choice,) = answer(kind, return_token_ids=True).whole(WHOLE)["choices"]
    assert choice["token_ids"] == [10, 11, 12]


@BOTH
@pytest.mark.parametrize("include", [True, False])
def test_the_published_clients_types_take_all_of_it(kind: type[Body], include: bool) -> None:
    types = pytest.importorskip("openai.types", reason="pip install openai")
    chat = kind is ChatBody
    whole: Any = types.chat.ChatCompletion if chat else types.Completion
    chunk: Any = types.chat.ChatCompletionChunk if chat else types.Completion
    whole.model_validate(answer(kind).whole(WHOLE), strict=True)
    for found in streamed(kind, stream_options={"include_usage": include}):
        if not chat:
            # OpenAI's server sends null until the last chunk; the client's type doesn't say so.
            found["choices"] = [c | {"finish_reason": "stop"} for c in found["choices"]]
        chunk.model_validate(found, strict=True)
