"""What OpenAI's fields ask of a decoder, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.presets import TINY
from fabric_ray.inference.tokenizer import ByteTokenizer
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import save_checkpoint
from fabric_ray.serve import BadRequest, NotFound, ServeArgs
from fabric_ray.serve.answers import error_body
from fabric_ray.serve.chat import ChatTemplate
from fabric_ray.serve.instance import check_model, max_model_len
from fabric_ray.serve.messages import Generate
from fabric_ray.serve.openai import Body, ChatBody, CompletionBody, parse, request_id
from fabric_ray.serve.openai import generate_request as to_decoder

ARGS = ServeArgs()
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ hint }}"
)
SAID = [{"role": "user", "content": "hi"}]
PROMPT: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "hi"},
    ChatBody: {"messages": SAID},
}
BOTH = pytest.mark.parametrize("kind", [CompletionBody, ChatBody])


def asked(
    kind: type[Body], args: ServeArgs = ARGS, context: int | None = None, **fields: Any
) -> Generate:
    body = parse(json.dumps({**PROMPT[kind], **fields}).encode(), kind)
    return to_decoder(body, args, ByteTokenizer(), TEMPLATE, id="i", max_model_len=context)


def refused(kind: type[Body], context: int | None = None, **fields: Any) -> str | None:
    """The field that is named."""
    with pytest.raises(BadRequest) as caught:
        asked(kind, context=context, **fields)
    assert caught.value.status in (400, 404)
    named: str | None = error_body(caught.value)["error"]["param"]
    return named


def test_a_request_says_what_a_decoder_needs() -> None:
    sent = asked(CompletionBody, max_tokens=5, stop="x", seed=3, temperature=0, top_p=0.5)
    assert sent.tokens == (256, *b"hi")
    assert (sent.max_tokens, sent.stop, sent.seed, sent.top_p) == (5, ("x",), 3, 0.5)
    assert asked(CompletionBody, prompt=[1, 2]).tokens == (1, 2)
    assert asked(CompletionBody, add_special_tokens=False).tokens == tuple(b"hi")


def test_a_chat_is_the_text_that_its_template_makes() -> None:
    assert asked(ChatBody).tokens == tuple(b"<user>hi<assistant>")
    longer = [{"role": "system", "content": "be brief"}, *SAID]
    assert asked(ChatBody, messages=longer).tokens == tuple(b"<system>be brief<user>hi<assistant>")
    hinted = asked(ChatBody, chat_template_kwargs={"hint": "<think>"})
    assert hinted.tokens == tuple(b"<user>hi<assistant><think>")
    assert asked(ChatBody, add_special_tokens=True).tokens[0] == ByteTokenizer.begin


@BOTH
def test_how_tokens_are_chosen_reaches_the_decoder(kind: type[Body]) -> None:
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["a", "b"],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    sent = asked(kind, **fields, max_tokens=7)
    fields["stop"] = ("a", "b")
    assert {name: getattr(sent, name) for name in fields} == fields
    assert sent.max_tokens == 7
    assert asked(kind, max_completion_tokens=7, max_tokens=7).max_tokens == 7
    assert asked(kind, max_completion_tokens=9).max_tokens == 9
    assert asked(kind, top_k=-1).top_k == 0


@BOTH
def test_a_field_that_is_null_is_one_that_was_left_out(kind: type[Body]) -> None:
    names = [*kind.model_fields, "logprobs", "n", "tools", "of_a_later_release"]
    nulls: dict[str, Any] = dict.fromkeys(names)
    plain, sent = asked(kind, seed=1), asked(kind, **nulls | PROMPT[kind] | {"seed": 1})
    assert sent == plain
    assert asked(kind, seed=1, stream_options={"include_usage": None}) == plain


# Bodies as published clients make them: what they always send, and what their options add.
SENT: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "vllm bench serve 0.32, openai": (
        CompletionBody,
        {
            "repetition_penalty": 1.0,
            "max_tokens": 20,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": 10,
            "min_p": 0.05,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        },
    ),
    "vllm bench serve 0.32, openai-chat": (
        ChatBody,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    "guidellm 0.8, text": (
        CompletionBody,
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 20,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "guidellm 0.8, chat": (
        ChatBody,
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 20,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "aiperf 0.13, chat": (
        ChatBody,
        {
            "stream": True,
            "max_completion_tokens": 20,
            "min_tokens": 20,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "lm-eval 0.4, local-completions": (
        CompletionBody,
        {"prompt": ["hi"], "max_tokens": 20, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    ),
    "lm-eval 0.4, local-chat-completions": (
        ChatBody,
        {"max_tokens": 20, "temperature": 0, "stop": ["\n\n", "</s>"], "seed": 1234},
    ),
    "openai, with all that changes nothing": (
        ChatBody,
        {
            "max_tokens": 20,
            "n": 1,
            "logprobs": False,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "store": False,
            "metadata": {"run": "1"},
            "service_tier": "auto",
            "user": "me",
            "safety_identifier": "me",
            "prompt_cache_key": "k",
        },
    ),
}


@pytest.mark.parametrize("client", SENT)
def test_what_published_clients_send_is_taken(client: str) -> None:
    kind, fields = SENT[client]
    sent = asked(kind, **fields, model="tiny-llama")
    assert sent.max_tokens == 20
    assert sent.stream == fields.get("stream", False)
    assert sent.ignore_eos == fields.get("ignore_eos", False)


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream_options": {"include_use": True}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": True}, "store"),
        ({"max_token": 5}, "max_token"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_would_change_an_answer_and_cannot_be_done_is_refused_by_name(
    kind: type[Body], fields: dict[str, Any], param: str
) -> None:
    assert refused(kind, **fields) == param


@pytest.mark.parametrize("prompt", [[], ["a", "b"], 5, [[1], [2]], None])
def test_a_completion_has_one_prompt(prompt: Any) -> None:
    assert refused(CompletionBody, prompt=prompt) == "prompt"


def test_each_endpoint_takes_its_own_prompt() -> None:
    assert refused(CompletionBody, messages=SAID) == "messages"
    assert refused(ChatBody, prompt="hi") == "prompt"


@pytest.mark.parametrize("variable", ["messages", "add_generation_prompt", "tools"])
def test_a_client_cannot_replace_what_a_template_is_given(variable: str) -> None:
    assert refused(ChatBody, chat_template_kwargs={variable: []}) == "chat_template_kwargs"


def test_a_number_that_is_not_finite_is_called_that() -> None:
    with pytest.raises(BadRequest, match=r"temperature: .*finite"):
        asked(CompletionBody, temperature=float("nan"))


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="expected 'tiny-llama'"):
        asked(CompletionBody, model="gpt")


@BOTH
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes, kind: type[Body]) -> None:
    with pytest.raises(BadRequest):
        parse(raw, kind)


@pytest.mark.parametrize("pages", [{"pages": 4}, {"pages": 40, "window_pages": 4}])
def test_a_chat_that_names_no_length_gets_what_there_is_room_for(pages: dict[str, int]) -> None:
    args = ServeArgs.model_validate(
        {
            "router": {"default_chat_tokens": 100, "max_tokens": 60},
            "decode": {"cache": {"page_tokens": 16, **pages}},
        }
    )
    prompt = len(asked(ChatBody, args).tokens)
    assert asked(ChatBody, args).max_tokens == 64 - prompt
    assert asked(CompletionBody, args).max_tokens == args.router.default_max_tokens
    wide = ServeArgs.model_validate({"router": {"default_chat_tokens": 100, "max_tokens": 60}})
    assert asked(ChatBody, wide).max_tokens == 60


@BOTH
def test_a_request_beyond_the_models_positions_is_refused(kind: type[Body]) -> None:
    prompt = len(asked(kind).tokens)
    for name in ("max_tokens", "max_completion_tokens"):
        assert asked(kind, context=prompt + 8, **{name: 8}).max_tokens == 8
        assert refused(kind, context=prompt + 8, **{name: 9}) == name
    field = "prompt" if kind is CompletionBody else "messages"
    assert refused(kind, context=prompt) == field
    assert refused(kind, context=prompt - 1, max_tokens=1) == field
    # A length that isn't named is what is left of them.
    assert asked(kind, context=prompt + 3).max_tokens == 3
    assert refused(kind, context=prompt + 3, min_tokens=4) == "min_tokens"


@pytest.mark.parametrize(
    ("positions", "tokenizer", "expected"),
    [
        (None, {}, None),
        (96, {}, 96),
        (96, {"model_max_length": 64}, 64),
        (96, {"model_max_length": 1e30}, 96),
        (None, {"model_max_length": 64}, 64),
    ],
)
def test_the_context_is_that_of_the_checkpoint(
    tmp_path: Path, positions: int | None, tokenizer: dict[str, Any], expected: int | None
) -> None:
    config = msgspec.structs.replace(TINY["tiny-llama"], max_positions=positions)
    save_checkpoint(tmp_path, config, InitialWeights(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert max_model_len(ServeArgs(model=str(tmp_path))) == expected
    assert max_model_len(ServeArgs(model=str(tmp_path), engine="my.engine:make")) is None
    assert max_model_len(ARGS) is None


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, False),
        ({"prefill": "bfloat16", "decode": "bfloat16"}, False),
        ({"prefill": "float32"}, False),  # the model's
        ({"dtype": "bfloat16", "decode": "bfloat16"}, False),
        ({"prefill": "bfloat16", "decode": "float16"}, True),
        ({"prefill": "bfloat16"}, True),
        ({"decode": "bfloat16"}, True),
        ({"dtype": "bfloat16", "decode": "float32"}, True),
        ({"engine": "json:loads", "decode": "float32"}, False),
        ({"engine": "json:loads", "prefill": "float16", "decode": "float32"}, True),
    ],
)
def test_caches_that_differ_in_their_dtype_are_refused_before_anything_starts(
    fields: dict[str, str], refused: bool
) -> None:
    caches = {r: {"cache": {"dtype": fields[r]}} for r in ("prefill", "decode") if r in fields}
    args = ServeArgs.model_validate({**fields, **caches})
    if not refused:
        check_model(args)
        return
    with pytest.raises(InvalidArgument, match=r"decode\.cache\.dtype: got .* expected one dtype"):
        check_model(args)


def test_the_id_that_a_client_gives_is_the_requests() -> None:
    assert request_id("mine", ChatBody) == "chatcmpl-mine"
    assert request_id("mine", CompletionBody) == "cmpl-mine"
    assert request_id(None, ChatBody) != request_id(None, ChatBody)
    with pytest.raises(BadRequest, match="x-request-id"):
        request_id("x" * 1000, ChatBody)
