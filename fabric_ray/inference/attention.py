"""Attention over paged keys and values: what the rows of a batch read and write where."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from fabric_ray.inference.protocols import PageTable
from fabric_ray.inference.tables import first_seen
from fabric_ray.kvcache.layout import CacheGroup


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens of one request: a chunk of a prompt, or one token to decode."""

    tokens: Sequence[int]
    start: int
    tables: tuple[PageTable, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Bucket(msgspec.Struct, frozen=True):
    """Segments that are attended together: of equal length, with about as many pages."""

    rows: Tensor
    """Where their tokens are in the batch, ``[segments, tokens]``."""
    table: Tensor
    """Their pages from the first that is looked back on, ``[segments, pages]``; page 0 for those
    that a segment hasn't."""
    positions: int
    """How many of the pages' positions are needed."""
    mask: Tensor | None
    """What sees what, ``[segments, 1, tokens, positions]``; ``None`` where that is causal."""
    void: tuple[Tensor, Tensor] | None
    """Segments and positions that no token of theirs sees; ``None`` if there are none."""


class Addresses(msgspec.Struct, frozen=True):
    """Where a batch's tokens lie in the pages of one group; the same for all its layers."""

    pages: Tensor
    """``[tokens]``"""
    slots: Tensor
    """Places in the pages, ``[tokens]``."""
    buckets: tuple[Bucket, ...]


def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """int64, in host memory."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def first_integers(count: int) -> Tensor:
    """0 to ``count - 1``, int64, in host memory."""
    return torch.arange(count, dtype=torch.int64, device="cpu")


def address(segments: Sequence[Segment], group: CacheGroup, at: int) -> Addresses:
    """Looks a batch up in the page tables of group number ``at``."""
    size = group.page_tokens
    positions = [p for s in segments for p in range(s.start, s.end)]
    pages = [s.tables[at][p // size] for s in segments for p in range(s.start, s.end)]
    rows: dict[tuple[int, int], list[tuple[int, Segment]]] = {}
    before = 0
    for segment in segments:
        looked = -(-segment.end // size) - first_seen(segment.start, group.window) // size
        # Padding at most doubles what is gathered.
        alike = (len(segment.tokens), looked.bit_length())
        rows.setdefault(alike, []).append((before, segment))
        before += len(segment.tokens)
    return Addresses(
        integers(pages),
        integers(positions) % size,
        tuple(_bucket(alike, group, at) for alike in rows.values()),
    )


def _bucket(alike: Sequence[tuple[int, Segment]], group: CacheGroup, at: int) -> Bucket:
    size = group.page_tokens
    segments = [segment for _, segment in alike]
    count = len(segments[0].tokens)
    firsts = [first_seen(s.start, group.window) // size for s in segments]
    tables = [
        list(s.tables[at][first : -(-s.end // size)])
        for s, first in zip(segments, firsts, strict=True)
    ]
    longest = max(map(len, tables))
    needed = max(s.end - first * size for s, first in zip(segments, firsts, strict=True))
    table = integers([pages + [0] * (longest - len(pages)) for pages in tables])
    rows = integers([before for before, _ in alike])[:, None] + first_integers(count)
    starts = integers([s.start for s in segments])
    if len(segments) == 1 and segments[0].start == 0 and _sees_all(segments[0].end, group):
        return Bucket(rows, table, needed, None, None)
    keys = integers(firsts)[:, None] * size + first_integers(needed)  # [segments, positions]
    queries = starts[:, None] + first_integers(count)  # [segments, tokens]
    seen = keys[:, None, :] <= queries[:, :, None]
    if group.window is not None:
        seen &= keys[:, None, :] > queries[:, :, None] - group.window
    void = (~seen.any(dim=1)).nonzero(as_tuple=True)
    return Bucket(rows, table, needed, seen[:, None], (void[0], void[1]) if len(void[0]) else None)


def _sees_all(end: int, group: CacheGroup) -> bool:
    return group.window is None or end <= group.window


def write(view: Tensor, addresses: Addresses, values: Tensor) -> None:
    """Puts ``[tokens, heads, width]`` into ``view`` ``[pages, heads, page tokens, width]``."""
    view[addresses.pages, :, addresses.slots] = values.to(view.dtype)


def gather(view: Tensor, bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """What a bucket reads of ``[pages, heads, page tokens, width]``: a copy,
    ``[segments, heads, positions, width]``."""
    picked = _heads_of_pages(view, bucket.table.flatten())
    picked = picked.reshape(len(picked), len(bucket.table), -1, picked.shape[-1])
    out = picked[:, :, : bucket.positions].transpose(0, 1).to(dtype)
    if bucket.void is not None:
        # Other requests' values lie there, or none: even a weight of zero would let NaNs through.
        segments, positions = bucket.void
        out[segments, :, positions] = 0
    return out


def _heads_of_pages(view: Tensor, pages: Tensor) -> Tensor:
    """A copy, ``[heads, pages, page tokens, width]``."""
    heads, tokens, width = view.shape[1:]
    page_stride, head_stride, token_stride, _ = view.stride()
    run = tokens * width
    if heads == 1:
        return view.index_select(0, pages).transpose(0, 1)
    if (tokens > 1 and token_stride != width) or page_stride % run or head_stride % run:
        out = view.new_empty(heads, len(pages), tokens, width)
        out.transpose(0, 1).copy_(view.index_select(0, pages))
        return out
    # What a head has of a page is one run: whole runs are picked from all that there are.
    last = (len(view) - 1) * page_stride + (heads - 1) * head_stride
    runs = view.as_strided((last // run + 1, run), (run, 1), view.storage_offset())
    by_head = first_integers(heads)[:, None] * (head_stride // run)
    picked = runs.index_select(0, (by_head + pages * (page_stride // run)).flatten())
    return picked.view(heads, len(pages), tokens, width)
