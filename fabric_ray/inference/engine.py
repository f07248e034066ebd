"""A transformer on paged caches: chunked prefill and batched decode, all ranks in one process.

Ranks share the weights; each has pages of its own heads. Every token's keys and values are read
from the pages, its own included, so it makes no difference to the result which chunk, engine or
machine they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from fabric_ray.inference import tail as tails
from fabric_ray.inference.attention import (
    Addresses,
    Segment,
    address,
    gather,
    integers,
    write,
)
from fabric_ray.inference.cache import Allocate, PagedCache, host_memory
from fabric_ray.inference.errors import InvalidTokens
from fabric_ray.inference.model import Model
from fabric_ray.inference.protocols import (
    DecodeRow,
    OnLayer,
    PrefillChunk,
    Tail,
    TailLayout,
)
from fabric_ray.inference.requests import check_segments
from fabric_ray.inference.spec import ITEMSIZE, CacheSpec, cache_layout, kept_by
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.models.transformer import Attention, masked_attention


class TorchEngine:
    """Both halves of the seam (:mod:`fabric_ray.inference.protocols`) for one model.

    Args:
        model: the weights, and how many ranks there are.
        spec: page size, number of pages, layout and dtype of the cache.
        allocate: gives the memory of each rank's buffers; memory of a transfer engine, if peers are
            to write to it.

    Raises:
        InvalidSpec: the cache can't be laid out so, or memory isn't as asked for.
    """

    def __init__(
        self, model: Model, spec: CacheSpec | None = None, *, allocate: Allocate = host_memory
    ) -> None:
        spec = CacheSpec() if spec is None else spec
        spec = msgspec.structs.replace(spec, dtype=spec.dtype or model.dtype)
        config = model.config
        self._model = model
        self._fingerprint = model.fingerprint
        self._kept = [kept_by(config, tp=model.tp, rank=rank) for rank in range(model.tp)]
        layouts = [
            cache_layout(config, spec, tp=model.tp, rank=rank, model=self._fingerprint)
            for rank in range(model.tp)
        ]
        self._cache = PagedCache(layouts, allocate)
        self._groups = layouts[0].groups
        self._group_of = {layer: at for at, g in enumerate(self._groups) for layer in g.layers}
        self._tail = TailLayout(config.vocab, config.hidden, model.dtype, ITEMSIZE[model.dtype])

    @property
    def model(self) -> Model:
        return self._model

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ranks(self) -> int:
        return self._model.tp

    def layout(self, rank: int) -> CacheLayout:
        return self._cache.layouts[rank]

    def buffers(self, rank: int) -> tuple[Tensor, ...]:
        return self._cache.buffers(rank)

    @property
    def tail(self) -> TailLayout:
        return self._tail

    def write_tail(self, tail: Tail, into: Tensor) -> None:
        tails.write_tail(self._tail, tail, into)

    def read_tail(self, source: Tensor) -> Tail:
        return tails.read_tail(self._tail, source)

    @torch.no_grad()
    def prefill(self, chunk: PrefillChunk, on_layer: OnLayer | None = None) -> Tail | None:
        """See :meth:`fabric_ray.inference.protocols.PrefillEngine.prefill`."""
        hidden = self._run([Segment(chunk.tokens, chunk.start, chunk.tables)], on_layer)
        if not chunk.last:
            return None
        last = hidden[-1:].clone()
        return Tail(self._model.module.logits(last)[0], last[0])

    @torch.no_grad()
    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """See :meth:`fabric_ray.inference.protocols.DecodeEngine.decode`."""
        if not rows:
            raise InvalidTokens("a step needs at least one row; don't call decode without")
        hidden = self._run([Segment((row.token,), row.position, row.tables) for row in rows], None)
        return self._model.module.logits(hidden)

    def _run(self, segments: Sequence[Segment], on_layer: OnLayer | None) -> Tensor:
        """Hidden states after the last norm, ``[tokens, hidden]``."""
        check_segments(segments, self._groups, self._model.config.vocab)
        addresses = [address(segments, group, at) for at, group in enumerate(self._groups)]

        def attend_pages(layer: Attention, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
            where = addresses[self._group_of[layer.number]]
            self._write(layer, kept, where)
            if on_layer is not None:
                on_layer(layer.number)
            # Each rank attends with its share of the heads to what its own pages hold.
            shares = queries.chunk(self.ranks, dim=1)
            mixed = [self._mixed(layer, rank, q, where) for rank, q in enumerate(shares)]
            return torch.cat(mixed, dim=1)

        tokens = integers([token for s in segments for token in s.tokens])
        positions = integers([p for s in segments for p in range(s.start, s.end)])
        hidden: Tensor = self._model.module.model(tokens, positions, attend_pages)
        return hidden

    def _write(self, layer: Attention, kept: tuple[Tensor, ...], where: Addresses) -> None:
        for rank, own in enumerate(self._kept):
            views = self._cache.views(rank, layer.number)
            for view, heads, values in zip(views, own, kept, strict=True):
                held = values[:, heads.first_head : heads.first_head + heads.held_heads]
                write(view, where, held)

    def _mixed(self, layer: Attention, rank: int, queries: Tensor, where: Addresses) -> Tensor:
        """Mixed values ``[tokens, heads, width]`` of one rank."""
        views = self._cache.views(rank, layer.number)
        mixed: Tensor | None = None
        for bucket in where.buckets:
            kept = tuple(gather(view, bucket, queries.dtype) for view in views)
            q = queries[bucket.rows].transpose(1, 2)
            out = masked_attention(layer, q, kept, bucket.mask).transpose(1, 2)
            if mixed is None:
                mixed = out.new_empty(len(queries), *out.shape[2:])
            mixed[bucket.rows] = out
        assert mixed is not None, "a batch has segments"
        return mixed
