"""What the demo is asked for, and what came of it."""

from __future__ import annotations

from typing import Any

import msgspec


class Options(msgspec.Struct, frozen=True):
    model: str = "tiny-llama"
    prefill_tp: int = 2
    """Tensor-parallel ranks of a prefiller; of a decoder below."""
    decode_tp: int = 1
    clients: int = 6
    """That send one request after the other."""
    seconds: float = 12.0
    """Of load: a third each before scaling, before the kill, and after it."""
    max_tokens: int = 24
    prompt_tokens: int = 96
    """The longest prompt of the load."""
    transport: str = "auto"
    seed: int = 0
    address: str | None = None
    """Of a running Ray cluster; none to start Ray here."""


class Layer(msgspec.Struct, frozen=True):
    """A layer of a prompt; seconds from the begin of the prompt's last pass."""

    layer: int
    computed: float
    """It was in the prefiller's cache."""
    posted: float
    """The last of its pages was given to the engines."""
    delivered: float
    """The last of its pages was known to be in the decoder's memory."""


class Streamed(msgspec.Struct, frozen=True):
    """The completion that was streamed."""

    prompt: str
    text: str
    tokens: int
    first_token: float
    """Seconds until the client had the first token."""
    seconds: float
    timings: dict[str, float | int]
    """As the decoder measured them, seconds: queue, prefill, transfer, first token; and counts."""
    equal: bool
    """Whether one engine that does both halves says the same."""
    layers: tuple[Layer, ...] = ()
    """As the prefiller saw them leave."""


class Answer(msgspec.Struct, frozen=True):
    """What a client got."""

    began: float
    """Seconds since the load began."""
    seconds: float
    tokens: int = 0
    error: str | None = None
    """What it was told instead of tokens."""
    wrong: bool = False
    """Tokens that one engine wouldn't have said."""


class Event(msgspec.Struct, frozen=True):
    """What was done to the deployment while requests flowed."""

    at: float
    """Seconds since the load began."""
    what: str


class Outcome(msgspec.Struct, frozen=True):
    options: Options
    streamed: Streamed
    answers: tuple[Answer, ...]
    events: tuple[Event, ...]
    replicas: tuple[dict[str, Any], ...]
    """What they said of themselves when all was over."""
    checks: dict[str, bool]

    @property
    def verified(self) -> bool:
        return all(self.checks.values())
