"""Messages between router, decoders and prefillers."""

from __future__ import annotations

import msgspec

from fabric_ray.serve.errors import KINDS, ServeError


class Generate(msgspec.Struct, frozen=True):
    """A request of the router to a decoder: one completion."""

    id: str
    tokens: tuple[int, ...]
    """The prompt."""
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end the completion; they aren't part of it."""
    min_tokens: int = 0
    """Tokens before which neither a stop token nor a stop text ends the completion."""
    ignore_eos: bool = False
    """Whether the tokenizer's stop tokens are tokens like others."""
    stream: bool = False
    """Whether to send each token in :class:`Emitted`, or all of them in :class:`Finished`."""
    blocks: tuple[bytes, ...] = ()
    """Digests of the prompt's first blocks, each of all tokens up to its block's end; for
    routing."""


class Emitted(msgspec.Struct, frozen=True, tag="emitted"):
    """New tokens of a completion that goes on."""

    tokens: tuple[int, ...]
    text: str


class Timings(msgspec.Struct, frozen=True):
    """Where a request's time went, seconds."""

    queue: float
    """From arrival at the decoder until it had pages there."""
    prefill_queue: float
    """The prompt's wait at the prefiller."""
    prefill: float
    """From the start of the prompt's first pass to the end of its last."""
    transfer: float
    """The wait for pages less ``prefill_queue`` and ``prefill``: messages, and the part of the
    transfer that didn't overlap with computation."""
    first_token: float
    """From arrival at the decoder to the first token."""
    per_token: float
    """Mean time between tokens after the first; 0 for a single token."""
    total: float
    cached_tokens: int
    """Tokens of the prompt that were in the decoder's cache and not sent."""
    prefill_attempts: int
    """Requests to prefillers."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The end of a completion that succeeded."""

    reason: str
    """``stop`` or ``length``."""
    tokens: tuple[int, ...]
    """All of them."""
    text: str
    """All of it; of a streamed completion, the part that no :class:`Emitted` had."""
    timings: Timings


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The end of a completion that failed."""

    kind: str
    message: str
    fields: dict[str, str] = {}

    @classmethod
    def of(cls, error: ServeError) -> Failed:
        fields = {name: str(value) for name, value in error.fields.items()}
        return cls(type(error).__name__, str(error), fields)

    def error(self) -> ServeError:
        """The exception that was sent."""
        return KINDS.get(self.kind, ServeError)(self.message, **self.fields)


Event = Emitted | Finished | Failed


class Prompt(msgspec.Struct, frozen=True):
    """The payload of a request to a prefiller."""

    id: str
    tokens: tuple[int, ...]
