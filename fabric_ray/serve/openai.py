"""Requests and answers of OpenAI's completions endpoint."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fabric_ray.inference.tokenizer import Tokenizer
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import BadRequest, NotFound, ServeError
from fabric_ray.serve.messages import Emitted, Finished, Generate
from fabric_ray.serve.routing import prompt_blocks

DONE = b"data: [DONE]\n\n"

_ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, 0),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields with one supported meaning, and the values that have it."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    """Whether the last chunk has the numbers of tokens."""


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    prompt: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool = False
    """Adds ``token_ids`` to choices."""

    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    suffix: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None


def parse(raw: bytes) -> Body:
    """Parses the body of a request.

    Raises:
        BadRequest: the JSON is malformed, or a field is unsupported; ``param`` names the field.
    """
    try:
        body = Body.model_validate_json(raw)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = str(wrong["loc"][0]) if wrong["loc"] else None
        if wrong["type"] == "json_invalid":
            raise BadRequest(f"the body is not JSON: {wrong['msg']}; send an object") from None
        why = "there is no such field" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        prefix = f"{field}: " if field else ""
        raise BadRequest(f"{prefix}{why[0].lower()}{why[1:]}", param=field) from None
    for field, allowed in _ONLY.items():
        value = getattr(body, field)
        if value not in allowed:
            raise BadRequest(f"{field} can only be {allowed[1]!r} here; leave it out", param=field)
    return body


def generate_request(body: Body, args: ServeArgs, tokenizer: Tokenizer, *, id: str) -> Generate:
    """The request to a decoder.

    Raises:
        BadRequest: the model is unknown, there is not exactly one prompt, or a limit is exceeded.
    """
    if body.model not in (None, args.model_id):
        raise NotFound(f"model: got {body.model!r}, expected {args.model_id!r}", param="model")
    most = args.router.max_tokens
    max_tokens = min(args.router.default_max_tokens, most)
    max_tokens = max_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens > most:
        raise BadRequest(
            f"max_tokens: got {max_tokens}, expected at most {most} (router.max_tokens); ask for "
            "less",
            param="max_tokens",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > 16:
        raise BadRequest(f"stop: got {len(stop)} texts, expected at most 16", param="stop")
    tokens = _tokens(body, tokenizer)
    return Generate(
        id=id,
        tokens=tokens,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=secrets.randbits(48) if body.seed is None else body.seed,
        stop=stop,
        stream=body.stream,
        blocks=prompt_blocks(
            tokens,
            block_tokens=args.decode.cache.page_tokens,
            most=args.router.prefix_blocks,
        ),
    )


def _tokens(body: Body, tokenizer: Tokenizer) -> tuple[int, ...]:
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BadRequest(
                f"prompt: got {len(prompt)} prompts, expected one; send one request for each",
                param="prompt",
            )
        prompt = prompt[0]
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise BadRequest("the prompt is empty; give text or tokens", param="prompt")
    return tuple(tokens)


class Answer:
    """Formats one completion for the client.

    Args:
        body: of the HTTP request.
        request: to the decoder.
        model: the model's name for clients.
    """

    def __init__(self, body: Body, request: Generate, *, model: str) -> None:
        self._body, self._request, self._model = body, request, model
        self._created = int(time.time())

    def whole(self, end: Finished) -> dict[str, Any]:
        """The answer of a request that isn't streamed."""
        return self._object(end.text, end.tokens, end.reason) | self._totals(end)

    def chunk(self, event: Emitted) -> bytes:
        """A chunk of a streamed answer."""
        return _data(self._object(event.text, event.tokens, None))

    def last(self, end: Finished) -> bytes:
        """The last chunk of a streamed answer."""
        totals = self._totals(end)
        options = self._body.stream_options
        if options is None or not options.include_usage:
            del totals["usage"]
        return _data(self._object(end.text, end.tokens[-1:], end.reason) | totals) + DONE

    def _object(self, text: str, tokens: tuple[int, ...], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(tokens)
        return {
            "id": self._request.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }

    def _totals(self, end: Finished) -> dict[str, Any]:
        prompt, completion = len(self._request.tokens), len(end.tokens)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": end.timings.cached_tokens},
        }
        return {"usage": usage, "x-fabric": msgspec.to_builtins(end.timings)}


def error_body(error: ServeError) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.fields.get("param"),
            "code": error.code,
        }
    }


def error_data(error: ServeError) -> bytes:
    """An error in a streamed answer; no ``[DONE]`` follows."""
    return _data(error_body(error))


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
