"""Requests of OpenAI's endpoints for completions and chats.

A field is taken, or refused by its name if leaving it out could change the answer.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from fabric_ray.inference.tokenizer import Tokenizer
from fabric_ray.serve.chat import TEMPLATE_FILE, ChatTemplate, check_messages
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import BadRequest, NotFound
from fabric_ray.serve.messages import Generate
from fabric_ray.serve.routing import prompt_blocks

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Fields with one supported meaning, that of leaving them out, and the values that have it."""

_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "user",
    }
)
"""Fields that change no answer here, whatever their value."""

_MOST_STOPS = 16
_MOST_ID = 128
"""Characters of a client's request id."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool | None = False
    """Whether a chunk before ``[DONE]`` has the numbers of tokens."""

    continuous_usage_stats: bool | None = False
    """Whether all chunks have them."""

    include_obfuscation: bool | None = False
    """Without effect: chunks aren't padded."""


class Body(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    prefix: ClassVar[str]
    """Of the ids of answers."""

    prompt_field: ClassVar[str]
    """The field that has the prompt."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Adds ``token_ids`` to choices."""

    @abstractmethod
    def tokens(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, ...]:
        """The prompt.

        Raises:
            BadRequest: it can't be made into tokens.
        """

    @abstractmethod
    def default_max_tokens(self, args: ServeArgs, room: int) -> int:
        """Most tokens of an answer to a body that doesn't say.

        Args:
            args: of the deployment.
            room: tokens that fit into a decoder's pages beside the prompt.
        """


class CompletionBody(Body):
    """The body of ``/v1/completions``."""

    prefix = "cmpl"
    prompt_field = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]]
    add_special_tokens: bool = True

    def tokens(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, ...]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise BadRequest(
                    f"prompt: got {len(prompt)} prompts, expected one; send one request for each",
                    param="prompt",
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, special=self.add_special_tokens)
        if not prompt:
            raise BadRequest("the prompt is empty; give text or tokens", param="prompt")
        return tuple(prompt)

    def default_max_tokens(self, args: ServeArgs, room: int) -> int:
        return args.router.default_max_tokens


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    prompt_field = "messages"

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as ``enable_thinking``."""
    add_special_tokens: bool = False

    def tokens(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, ...]:
        messages = check_messages(self.messages)
        if template is None:
            raise BadRequest(
                "messages: the model has no chat template; set chat_template to a file with one, "
                f"put {TEMPLATE_FILE} into the model's directory, or use /v1/completions",
                param="messages",
            )
        text = template.render(messages, self.chat_template_kwargs)
        tokens = tokenizer.encode(text, special=self.add_special_tokens)
        if not tokens:
            raise BadRequest(
                "messages: the model's chat template made an empty prompt of them; give text",
                param="messages",
            )
        return tuple(tokens)

    def default_max_tokens(self, args: ServeArgs, room: int) -> int:
        return max(1, min(args.router.default_chat_tokens, room))


B = TypeVar("B", bound=Body)


def parse(raw: bytes, kind: type[B]) -> B:
    """Parses the body of a request. A field that is ``null`` is one that was left out.

    Raises:
        BadRequest: the JSON is malformed, or a field is unsupported; ``param`` names the field.
    """
    try:
        given = from_json(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}; send an object") from None
    if not isinstance(given, dict):
        raise BadRequest(f"the body is a JSON {type(given).__name__}, expected an object")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name in _NEUTRAL and not any(_equal(value, neutral) for neutral in _NEUTRAL[name]):
            expected = " or ".join(map(repr, _NEUTRAL[name]))
            raise BadRequest(
                f"{name}: got {value!r:.100}, only {expected} is supported; leave it out",
                param=name,
            )
    left_out = _NEUTRAL.keys() | _WITHOUT_EFFECT
    try:
        return kind.model_validate({n: v for n, v in fields.items() if n not in left_out})
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = str(wrong["loc"][0])
        unknown = wrong["type"] == "extra_forbidden"
        why = "this field is not supported; leave it out" if unknown else wrong["msg"]
        raise BadRequest(f"{field}: {why[0].lower()}{why[1:]}", param=field) from None


def _equal(value: object, other: object) -> bool:
    """JSON's ``0`` and ``false`` differ, and Python's don't."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def request_id(header: str | None, kind: type[Body]) -> str:
    """The id of a request everywhere: in its answer, in logs and in the trace.

    Args:
        header: the client's, ``x-request-id``.
        kind: of the body.

    Raises:
        BadRequest: the client's id is too long.
    """
    if header is not None and len(header) > _MOST_ID:
        raise BadRequest(
            f"x-request-id: got {len(header)} characters, expected at most {_MOST_ID}; shorten it"
        )
    return f"{kind.prefix}-{header or secrets.token_hex(16)}"


def generate_request(
    body: Body,
    args: ServeArgs,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    *,
    id: str,
    max_model_len: int | None,
) -> Generate:
    """The request to a decoder.

    Args:
        body: of the HTTP request.
        args: of the deployment.
        tokenizer: the model's.
        template: the model's chat template.
        id: of the request.
        max_model_len: most tokens of a request, prompt included.

    Raises:
        BadRequest: the model is unknown, there is not exactly one prompt, or a limit is exceeded.
    """
    if body.model not in (None, args.model_id):
        raise NotFound(f"model: got {body.model!r}, expected {args.model_id!r}", param="model")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stop) > _MOST_STOPS:
        raise BadRequest(
            f"stop: got {len(stop)} texts, expected at most {_MOST_STOPS}", param="stop"
        )
    tokens = body.tokens(tokenizer, template)
    if max_model_len is not None and len(tokens) >= max_model_len:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens, expected at most {max_model_len - 1}: the "
            f"model's maximum context length is {max_model_len}; shorten the prompt",
            param=body.prompt_field,
        )
    max_tokens = _max_tokens(body, args, len(tokens), max_model_len)
    return Generate(
        id=id,
        tokens=tokens,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=secrets.randbits(48) if body.seed is None else body.seed,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        stop=stop,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        blocks=prompt_blocks(
            tokens,
            block_tokens=args.decode.cache.page_tokens,
            most=args.router.prefix_blocks,
        ),
    )


def _max_tokens(body: Body, args: ServeArgs, prompt_tokens: int, max_model_len: int | None) -> int:
    most = args.router.max_tokens
    cache = args.decode.cache
    pages = min(cache.pages, cache.window_pages or cache.pages)
    room = pages * cache.page_tokens - prompt_tokens
    context = None if max_model_len is None else max_model_len - prompt_tokens
    named = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(body, name)) is not None
    }
    if len(set(named.values())) > 1:
        raise BadRequest(
            f"max_tokens: got {body.max_tokens} and max_completion_tokens "
            f"{body.max_completion_tokens}, expected one of the two",
            param="max_tokens",
        )
    for name, value in named.items():
        if value > most:
            raise BadRequest(
                f"{name}: got {value}, expected at most {most} (router.max_tokens); ask for less",
                param=name,
            )
        if context is not None and value > context:
            raise BadRequest(
                f"{name}: got {value}, expected at most {context}: the prompt has {prompt_tokens} "
                f"tokens, the model's maximum context length is {max_model_len}; shorten the "
                "prompt or ask for less",
                param=name,
            )
    default = min(body.default_max_tokens(args, room), most)
    if context is not None:
        default = min(default, context)
    tokens = next(iter(named.values()), default)
    if body.min_tokens > tokens:
        raise BadRequest(
            f"min_tokens: got {body.min_tokens}, expected at most max_tokens, which is {tokens}",
            param="min_tokens",
        )
    return tokens
