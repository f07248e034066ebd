"""The interface of an inference engine for disaggregated deployments.

An engine only computes. Its caller assigns pages and routes requests, and decides when bytes may
move. An engine keeps no state of requests: each call passes the page tables it works on. A page
table lists the pages of one cache group: position ``p`` lies in page ``table[p // page_tokens]``.
Only one thread at a time calls an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from fabric_ray.kvcache.layout import CacheLayout

PageTable = Sequence[int]
"""Pages of one group, one for each stretch of ``page_tokens`` tokens."""

NO_PAGE = (1 << 32) - 1
"""The entry of a table where no page is: it lies wholly before a window."""

OnLayer = Callable[[int], None]
"""Called with a layer's number in the model."""


class PrefillChunk(msgspec.Struct, frozen=True):
    """A stretch of one request's prompt."""

    tokens: Sequence[int]
    """Ids of positions ``start``, ``start + 1`` and on; at least one."""
    start: int
    """Position of the first. What lies before must be in the pages already: computed by earlier
    chunks, found in a prefix cache, or written by a peer."""
    tables: tuple[PageTable, ...]
    """For each group of the layout, long enough for the chunk's last position."""
    last: bool = True
    """Whether the prompt ends with this chunk."""


class DecodeRow(msgspec.Struct, frozen=True):
    """One request's step in a batch."""

    token: int
    """The id at ``position``, whose keys and values the step writes."""
    position: int
    """All positions before it must be in the pages."""
    tables: tuple[PageTable, ...]
    """For each group of the layout, long enough for ``position``."""


class Tail(msgspec.Struct, frozen=True):
    """What a prefill hands to the decoder beside pages, for the position after the prompt's end."""

    logits: Tensor
    """``[vocab]``, of the token that follows the prompt."""
    hidden: Tensor
    """``[hidden]``, the state that the logits are computed from, final norm included."""


class TailLayout(msgspec.Struct, frozen=True):
    """How a tail lies in memory, on both ends of a transfer: logits, then the hidden state."""

    vocab: int
    hidden: int
    dtype: str
    """As torch names it, ``float32`` for example."""
    itemsize: int

    @property
    def hidden_at(self) -> int:
        """Where the hidden state begins, a multiple of 8 bytes."""
        return -(-self.vocab * self.itemsize // 8) * 8

    @property
    def nbytes(self) -> int:
        return self.hidden_at + -(-self.hidden * self.itemsize // 8) * 8


class InferenceEngine(Protocol):
    """Members of prefill and decode engines."""

    @property
    def fingerprint(self) -> str:
        """Configuration, weights and precision as one short text. Two engines may exchange pages
        if their fingerprints are equal; it is the ``model`` of their layouts."""

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks, all of which this engine drives."""

    def layout(self, rank: int) -> CacheLayout:
        """Where the pages of one rank lie: groups, page sizes, strides. It never changes."""

    def buffers(self, rank: int) -> Sequence[Tensor]:
        """The memory that ``layout(rank).buffers`` counts, in that order, as uint8: what is to be
        registered with a transfer engine."""

    @property
    def tail(self) -> TailLayout:
        """How :meth:`PrefillEngine.write_tail` lays a tail out."""


class PrefillEngine(InferenceEngine, Protocol):
    """Computes prompts."""

    def prefill(self, chunk: PrefillChunk, on_layer: OnLayer | None = None) -> Tail | None:
        """Writes a chunk's keys and values to its pages, layer by layer.

        Chunks of a prompt come in order; chunks of different prompts may be interleaved.

        Args:
            chunk: tokens and where they go.
            on_layer: called once for each layer, in the order in which they are computed, as soon
                as every rank's pages hold the chunk's part of that layer: they may be sent from
                then on. What it raises ends the chunk and is raised; the pages hold a part of it
                then.

        Returns:
            The tail if this was the prompt's last chunk.

        Raises:
            InferenceError: tokens or tables don't fit the model or the cache; nothing was written.
        """

    def write_tail(self, tail: Tail, into: Tensor) -> None:
        """Lays a tail out in ``into``: uint8, at least ``self.tail.nbytes`` long."""


class DecodeEngine(InferenceEngine, Protocol):
    """Continues prompts; any engine may have computed their pages."""

    def read_tail(self, source: Tensor) -> Tail:
        """A copy of the tail that ``write_tail`` laid out, on whichever machine."""

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """One step of each row's request; no two rows may write to the same page.

        Returns:
            Logits ``[rows, vocab]`` of the tokens that follow.

        Raises:
            InferenceError: tokens or tables don't fit the model or the cache; nothing was written.
        """


class WholeEngine(PrefillEngine, DecodeEngine, Protocol):
    """An engine with both halves on the same pages."""
