"""What one rank's paged cache looks like. Ranks tell each other when they meet."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True):
    """A place in one of the rank's buffers."""

    buffer: int
    """Which of :attr:`CacheLayout.buffers`."""
    offset: int
    """Bytes from its begin."""


class CacheTensor(msgspec.Struct, frozen=True):
    """One tensor of each layer of a group: pages x heads x tokens x width in any order of the first
    three, width innermost. All strides are bytes."""

    name: str
    """Keys and values are ``k`` and ``v``, MLA's are ``latent`` and ``rope``."""
    heads: int
    """Of the whole model; 1 for what isn't divided by heads."""
    first_head: int
    """The first of those heads that this rank holds."""
    held_heads: int
    """How many it holds."""
    width: int
    """Elements of one head of one token; they lie side by side."""
    dtype: str
    """As torch names it, ``bfloat16`` for example."""
    page_stride: int
    head_stride: int
    token_stride: int
    places: tuple[Place, ...]
    """Where page 0 begins, for each layer of the group."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose tokens lie in the same pages."""

    name: str
    layers: tuple[int, ...]
    """Their numbers in the model, in the order in which they are computed."""
    page_tokens: int
    """Tokens of a page."""
    pages: int
    """Pages that there are, numbered from 0."""
    tensors: tuple[CacheTensor, ...]
    window: int | None = None
    """Tokens that these layers look back; ``None`` for all of them."""


class CacheLayout(msgspec.Struct, frozen=True):
    """One rank's cache."""

    model: str
    """Whose activations these are: model, revision and whatever else must agree for the bytes to
    mean the same."""
    groups: tuple[CacheGroup, ...]
    """Most models have one, hybrid ones several."""
    buffers: tuple[int, ...]
    """The length in bytes of each registered region that holds pages."""
