"""Turns the messages of a chat into the prompt that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fabric_ray.inference.errors import InferenceError
from fabric_ray.serve.errors import BadRequest

TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_OLD_CONFIG_FILE = "special_tokens_map.json"
"""Special tokens of checkpoints whose ``tokenizer_config.json`` lacks them."""

_ROLES = ("system", "developer", "user", "assistant")
_FIELDS = ("role", "content", "name")

Messages = Sequence[Mapping[str, str]]
"""``role``, ``content`` and maybe ``name`` of each message."""


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained to say; a prompt has it as it is."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers take it: the same filters, functions and
    variables. It runs in Jinja's sandbox.

    Args:
        source: of the template.
        special_tokens: texts of special tokens by name, such as ``bos_token``.
        path: of the file that has the template, for errors.

    Raises:
        InferenceError: the template has a syntax error.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, path: Path | str = ""
    ) -> None:
        # As transformers' apply_chat_template makes it, which published templates rely on.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InferenceError(
                f"the chat template of {path} can't be read (line {error.lineno}: "
                f"{error.message}); set chat_template to a file with another one"
            ) from error
        self._own: dict[str, Any] = {
            **(special_tokens or {}),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }

    def render(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt, special tokens included.

        Args:
            messages: of the chat.
            variables: for the template, beside those that every template gets.

        Raises:
            BadRequest: a variable would replace one that every template gets, or the template
                refuses the messages.
        """
        variables = variables or {}
        if taken := variables.keys() & {"messages", *self._own}:
            raise BadRequest(
                f"chat_template_kwargs: got {min(taken)}, which is set already; leave it out",
                param="chat_template_kwargs",
            )
        try:
            return self._template.render(messages=messages, **self._own, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRequest(
                f"messages: the model's chat template refuses them ({error}); change their order, "
                "roles or chat_template_kwargs",
                param="messages",
            ) from error


def load_chat_template(
    directory: Path | None, *, file: Path | str | None = None
) -> ChatTemplate | None:
    """The chat template of a checkpoint, if there is one: ``chat_template.jinja``, or
    ``chat_template`` in ``tokenizer_config.json``.

    Args:
        directory: of the checkpoint.
        file: a template that goes before the checkpoint's.

    Raises:
        InferenceError: a file can't be read.
    """
    config = _config(directory, _CONFIG_FILE)
    special = _special_tokens({**_config(directory, _OLD_CONFIG_FILE), **config})
    beside = None if directory is None else directory / TEMPLATE_FILE
    path = Path(file) if file is not None else beside
    if path is not None and (file is not None or path.exists()):
        try:
            source = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InferenceError(
                f"the chat template {path} can't be read ({error}); give a file that every "
                "replica has"
            ) from error
        return ChatTemplate(source, special_tokens=special, path=path)
    named = config.get("chat_template")
    if isinstance(named, list):  # several, for chats with tools or documents
        named = {entry["name"]: entry["template"] for entry in named}.get("default")
    if named is None or directory is None:
        return None
    return ChatTemplate(str(named), special_tokens=special, path=directory / _CONFIG_FILE)


def model_max_length(directory: Path | None) -> int | None:
    """``model_max_length`` in a checkpoint's ``tokenizer_config.json``.

    Raises:
        InferenceError: the file can't be read.
    """
    found = _config(directory, _CONFIG_FILE).get("model_max_length")
    # Tokenizers without a limit have 1e30.
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        return None
    return int(found) if 1 <= found < 1e18 else None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The messages with their contents as plain text; parts of text are joined by line feeds.

    Raises:
        BadRequest: there is none, or one has what a model of text can't read.
    """
    if not messages:
        raise BadRequest("messages: got none, expected at least one", param="messages")
    return [_checked(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], where: str) -> dict[str, str]:
    # Clients send empty fields of earlier answers back.
    given = {name: value for name, value in message.items() if value not in (None, [], {})}
    if unknown := [name for name in given if name not in _FIELDS]:
        raise _wrong(where, unknown[0], f"{', '.join(_FIELDS)}; leave it out")
    if given.get("role") not in _ROLES:
        raise _wrong(f"{where}.role", given.get("role"), f"one of {', '.join(_ROLES)}")
    if not isinstance(given.get("name", ""), str):
        raise _wrong(f"{where}.name", given["name"], "a text")
    return {**given, "content": _text(given.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "a text, or a list of text parts")
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text":
        raise _wrong(where, kind, "a part of type 'text'; the model reads text only")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", part.get("text"), "a text")
    return str(part["text"])


def _wrong(where: str, got: Any, expected: str) -> BadRequest:
    return BadRequest(f"{where}: got {got!r:.100}, expected {expected}", param="messages")


def _config(directory: Path | None, name: str) -> dict[str, Any]:
    if directory is None or not (path := directory / name).exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        return dict(found)
    except (OSError, ValueError, TypeError) as error:
        raise InferenceError(f"{path} is no JSON object ({error}); restore it") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
