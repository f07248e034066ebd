"""What router, decoders and prefillers tell each other."""

from __future__ import annotations

from enum import Enum

import msgspec

from fabric_ray.kvcache.errors import KvError
from fabric_ray.serve.errors import KINDS, ServeError


class Generate(msgspec.Struct, frozen=True):
    """One completion, as the router asks a decoder for it."""

    id: str
    tokens: tuple[int, ...]
    """The prompt."""
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the completion, and aren't part of it."""
    stream: bool = False
    """Whether tokens are wanted as they come, or all at once in :class:`Finished`."""
    blocks: tuple[bytes, ...] = ()
    """Digests of the prompt's begin, each of everything up to a block's end: for routing."""


class Emitted(msgspec.Struct, frozen=True, tag="emitted"):
    """Tokens as they come."""

    tokens: tuple[int, ...]
    text: str


class Timings(msgspec.Struct, frozen=True):
    """Where a request's time went, seconds."""

    queue: float
    """Until it had pages at the decoder."""
    prefill_queue: float
    """That the prompt waited at the prefiller."""
    prefill: float
    """From the begin of the prompt's first pass to the end of its last."""
    transfer: float
    """Of the wait for pages, what neither waiting nor computing explains: messages, and what of the
    transfer computing did not hide."""
    first_token: float
    """From arrival at the decoder to the first token."""
    per_token: float
    """Between tokens after the first, on average; 0 where there is one only."""
    total: float
    cached_tokens: int
    """Of the prompt, found in the decoder's cache and not sent."""
    prefill_attempts: int
    """Prefillers that were asked."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The end of a completion that came out right."""

    reason: str
    """``stop`` or ``length``."""
    tokens: tuple[int, ...]
    """All of them."""
    text: str
    """All of it; where it was streamed, what hadn't been sent."""
    timings: Timings


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The end of one that didn't."""

    kind: str
    message: str
    fields: dict[str, str] = {}

    @classmethod
    def of(cls, error: ServeError) -> Failed:
        fields = {name: str(value) for name, value in error.fields.items()}
        return cls(type(error).__name__, str(error), fields)

    def error(self) -> ServeError:
        """The exception that it stands for."""
        return KINDS.get(self.kind, ServeError)(self.message, **self.fields)


Event = Emitted | Finished | Failed


class Prompt(msgspec.Struct, frozen=True):
    """The payload of a request to a prefiller."""

    id: str
    tokens: tuple[int, ...]


class Reason(Enum):
    """Why a prefiller turned a prompt away, where a decoder must be able to tell."""

    BUSY = "busy"
    """It did nothing because it has too much to do."""
    TOO_LONG = "too long"
    """It has too few pages for the prompt, whatever else it does."""

    def text(self, why: str) -> str:
        """What the prefiller's end of the transfer is told."""
        return f"{self.value}: {why}"

    @classmethod
    def of(cls, error: KvError) -> Reason | None:
        """The reason that a decoder's end of the transfer reports, if it is one of these."""
        said = str(error)
        for lead in _LEADS:
            said = said.removeprefix(lead)
        return next((reason for reason in cls if said.startswith(f"{reason.value}: ")), None)


_LEADS = ("the prefiller gave up: ", "the prefiller refused the request: ")
"""What the transfer says before a prefiller's own words."""
