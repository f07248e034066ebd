"""What vLLM's scheduler tells its workers of a step, and a decoder's workers a prefiller's."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import DecodeError

_REMEMBERED = 10_000
_K = TypeVar("_K")
_T = TypeVar("_T")


class Claim(msgspec.Struct, frozen=True):
    """The payload of a pull: the prefill, and the number of ranks that pull its pages."""

    transfer: str
    """The name that both requests carry."""
    digest: bytes
    """Of the prompt, so that a reused name can't bring another prompt's pages. Empty where the
    decoder needs no pages."""
    attempt: str
    """The decoder's request; all of its ranks ask."""
    ranks: int
    """How many they are."""
    weights: str
    """Which ones the decoder computes with, so that a prefiller with others can't answer."""

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decoded(data: bytes) -> Claim:
        """
        Raises:
            DecodeError: it isn't one.
        """
        try:
            return from_msgpack(data, Claim)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DecodeError(f"not a claim of a vLLM decoder: {error}") from error


@dataclass(frozen=True)
class Ready:
    """A request whose last prompt token is computed in this step, or was in an earlier one."""

    request: str
    transfer: str
    digest: bytes
    tokens: int
    """Of the prompt."""
    computed: int
    """How many of the first ones are in the pages before the step, from any source; the rest is
    when the pass is through."""
    tables: tuple[tuple[int, ...], ...]
    """vLLM's blocks of all of them, in order, for each cache group. Those before a window may be
    anything."""


@dataclass(frozen=True)
class Load:
    """Blocks of a request that are to be filled by a prefiller; none where it is declined."""

    request: str
    transfer: str
    digest: bytes
    offer: str
    """Of the prefiller, as its scheduler gave it to the request."""
    tokens: int
    have: int
    """How many of the first tokens are here already: whole blocks."""
    tables: tuple[tuple[int, ...], ...]
    """As those of :class:`Ready`."""


@dataclass(frozen=True)
class Failed:
    """A request that ends without its pages."""

    request: str
    transfer: str
    why: str
    held: bool
    """Whether its blocks are kept until nothing reads them; else they are taken back already."""


@dataclass
class Step:
    """What becomes of transfers in one step of the scheduler."""

    is_idle: bool = False
    """Whether no request computes in it."""
    ready: list[Ready] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests that were ready, and whose blocks are taken from them."""
    finished: list[tuple[str, str]] = field(default_factory=list)
    """Requests whose blocks are held for decoders, and their transfers."""
    failed: list[Failed] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Requests whose loads were cancelled."""
    declined: list[Load] = field(default_factory=list)
    """What is never loaded: the prefiller is told, so that it keeps no pages."""
    renewals: dict[str, list[int]] = field(default_factory=dict)
    """Leases that a decoder renews, by the prefiller's offer."""
    is_starved: bool = False
    """Whether a prompt has lacked blocks for so long that no lease is renewed here."""


def remember(names: OrderedDict[_K, _T], name: _K, value: _T) -> None:
    """Adds the name of an ended transfer; the oldest ones are forgotten."""
    names[name] = value
    while len(names) > _REMEMBERED:
        names.popitem(last=False)


def digest(
    tokens: Iterable[int] | None,
    *,
    inputs: Iterable[str] = (),
    adapter: str | None = None,
    embeddings: Any = None,
) -> bytes:
    """16 bytes that name a prompt: its tokens or embeddings (a tensor), the images and sounds in
    it, the LoRA adapter."""
    found = hashlib.blake2b(digest_size=16)
    found.update(msgspec.msgpack.encode([list(tokens or ()), list(inputs), adapter]))
    if embeddings is not None:
        import torch

        found.update(f"{embeddings.dtype} {list(embeddings.shape)}".encode())
        found.update(embeddings.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.digest()


def digest_of(request: Any) -> bytes:
    """That of a ``vllm.v1.request.Request``."""
    lora = request.lora_request
    return digest(
        request.prompt_token_ids,
        inputs=[feature.identifier for feature in request.mm_features],
        adapter=None if lora is None else lora.lora_name,
        embeddings=request.prompt_embeds,
    )
