"""Answers and errors in OpenAI's format, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from fabric_ray.serve.errors import ServeError
from fabric_ray.serve.messages import Emitted, Finished, Generate
from fabric_ray.serve.openai import Body, ChatBody

DONE = b"data: [DONE]\n\n"


class Answer:
    """Formats one completion for the client.

    Args:
        body: of the HTTP request.
        request: to the decoder.
        model: the model's name for clients.
    """

    _whole_object = _chunk_object = "text_completion"

    def __init__(self, body: Body, request: Generate, *, model: str) -> None:
        self._body, self._request, self._model = body, request, model
        self._created = int(time.time())
        self._sent = 0
        """Tokens in chunks."""

    @staticmethod
    def of(body: Body, request: Generate, *, model: str) -> Answer:
        """For the endpoint of the body."""
        kind = ChatAnswer if isinstance(body, ChatBody) else Answer
        return kind(body, request, model=model)

    def whole(self, end: Finished) -> dict[str, Any]:
        """The answer of a request that isn't streamed."""
        choice = self._choice(self._message(end.text), end.tokens, end.reason)
        found = self._object(self._whole_object, choice)
        return found | {"usage": self._usage(len(end.tokens), end)} | _times(end)

    def opening(self) -> bytes:
        """What goes before the first chunk of a streamed answer."""
        return b""

    def chunk(self, event: Emitted) -> bytes:
        """A chunk of a streamed answer."""
        self._sent += len(event.tokens)
        return self._chunk(self._choice(self._part(event.text), event.tokens))

    def last(self, end: Finished) -> bytes:
        """The end of a streamed answer: the rest of the text, why it ends, and ``[DONE]``. Times,
        and the numbers of tokens if the client asked for them, are in the last event."""
        self._sent = len(end.tokens)
        choices = self._last_choices(end)
        if self._body.stream_options.include_usage:
            usage = {"usage": self._usage(len(end.tokens), end)}
            final = self._object(self._chunk_object) | usage
        else:
            final = self._object(self._chunk_object, choices.pop())
        return b"".join(map(self._chunk, choices)) + _data(final | _times(end)) + DONE

    def _message(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""
        return {"text": text}

    def _part(self, text: str) -> dict[str, Any]:
        """The text of a chunk's choice."""
        return {"text": text}

    def _last_choices(self, end: Finished) -> list[dict[str, Any]]:
        return [self._choice(self._part(end.text), end.tokens[-1:], end.reason)]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        found = self._object(self._chunk_object, choice)
        options = self._body.stream_options
        if options.include_usage:
            # OpenAI's chunks have the field, without a value until the last.
            found["usage"] = self._usage(self._sent) if options.continuous_usage_stats else None
        return _data(found)

    def _choice(
        self, text: dict[str, Any], tokens: tuple[int, ...] = (), reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _object(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._request.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }

    def _usage(self, completion: int, end: Finished | None = None) -> dict[str, Any]:
        prompt = len(self._request.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if end is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": end.timings.cached_tokens}
        return usage


class ChatAnswer(Answer):
    """Formats one answer of a chat for the client."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        return self._chunk(self._choice({"delta": {"role": "assistant", "content": ""}}))

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _last_choices(self, end: Finished) -> list[dict[str, Any]]:
        text = self._choice(self._part(end.text), end.tokens[-1:])
        return [text, self._choice({"delta": {}}, reason=end.reason)]


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


def _times(end: Finished) -> dict[str, Any]:
    return {"x-fabric": msgspec.to_builtins(end.timings)}


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
