"""The layout of one rank's paged cache. Instances exchange layouts when they connect."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True):
    """A position in one of the rank's buffers."""

    buffer: int
    """Index into :attr:`CacheLayout.buffers`."""
    offset: int
    """Bytes from the start of the buffer."""


class CacheTensor(msgspec.Struct, frozen=True):
    """One tensor of each layer of a group: pages x heads x tokens x width in any order of the first
    three, width innermost. All strides are bytes."""

    name: str
    """Keys and values are ``k`` and ``v``, MLA's are ``latent`` and ``rope``."""
    heads: int
    """Heads of the whole model; 1 for a tensor without heads."""
    first_head: int
    """The first head that this rank holds."""
    held_heads: int
    """Number of heads that this rank holds."""
    width: int
    """Elements of one head of one token, contiguous."""
    dtype: str
    """Torch's name, for example ``bfloat16``."""
    page_stride: int
    head_stride: int
    token_stride: int
    places: tuple[Place, ...]
    """The start of page 0, for each layer of the group."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one page table."""

    name: str
    """The kind of its layers; a kind may have several groups."""
    layers: tuple[int, ...]
    """Numbers of the layers in the model, in the order of computation. A kind has each once."""
    page_tokens: int
    """Tokens per page."""
    pages: int
    """Number of pages."""
    tensors: tuple[CacheTensor, ...]
    window: int | None = None
    """Sliding window of these layers, in tokens; ``None`` for full attention."""
    block_tokens: int | None = None
    """Tokens of the blocks that the engine gives requests, and reuses as a whole: of a block that a
    window begins in, all pages are sent. ``None`` where pages are reused one by one."""
    is_state: bool = False
    """Whether the layers are recurrent: a request has one page, with the state after all of its
    tokens. Such a page counts as one token."""


class CacheLayout(msgspec.Struct, frozen=True):
    """One rank's cache."""

    model: str
    """Names the activations: model, revision and all else that must be equal for the bytes to mean
    the same."""
    groups: tuple[CacheGroup, ...]
    """One for most models, several for hybrid models."""
    buffers: tuple[int, ...]
    """Bytes of each registered region that holds pages."""
    is_stage: bool = False
    """Whether its instance is one stage of a pipeline, and others have the model's other layers.
    What a stage and its peer have in common is paired; a decoder asks each stage."""
