"""A transformer on paged caches: chunked prefill and batched decode, all ranks in one process.

What ranks would add up over the wire is added here, in the order of the ranks. Every token's keys
and values are read from the pages, its own included, so it makes no difference to the result which
chunk, engine or machine they come from.
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
    attend,
    gather,
    integers,
    write,
)
from fabric_ray.inference.cache import Allocate, PagedCache, host_memory
from fabric_ray.inference.errors import InvalidTokens
from fabric_ray.inference.heads import Angles, Projected, heads_of
from fabric_ray.inference.model import Model
from fabric_ray.inference.protocols import (
    DecodeRow,
    OnLayer,
    PrefillChunk,
    Tail,
    TailLayout,
)
from fabric_ray.inference.requests import check_segments
from fabric_ray.inference.spec import CacheSpec, cache_layout
from fabric_ray.kvcache.layout import CacheLayout
from fabric_ray.models.tensor_parallel import embed, feed_forward, logits, reduce
from fabric_ray.models.transformer import rms_norm


class TorchEngine:
    """Both halves of the seam (:mod:`fabric_ray.inference.protocols`) for one model.

    Args:
        model: weights of all ranks.
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
        config, tp = model.config, len(model.ranks)
        self._model = model
        self._heads = heads_of(config, tp)
        self._angles = Angles(config.rope, self._heads.rope_dim, model.torch_dtype)
        self._fingerprint = model.fingerprint
        layouts = [
            cache_layout(config, spec, tp=tp, rank=rank, model=self._fingerprint)
            for rank in range(tp)
        ]
        self._cache = PagedCache(layouts, allocate)
        self._groups = layouts[0].groups
        self._group_of = {layer: at for at, g in enumerate(self._groups) for layer in g.layers}
        fields = (("logits", config.vocab), ("hidden", config.hidden))
        self._tail = tails.tail_layout(fields, model.dtype)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ranks(self) -> int:
        return len(self._model.ranks)

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
        x = self._run([Segment(chunk.tokens, chunk.start, chunk.tables)], on_layer)
        if not chunk.last:
            return None
        hidden = self._normed(x[-1:])
        return Tail(logits(self._model.config, self._model.ranks, hidden)[0], hidden[0])

    @torch.no_grad()
    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """See :meth:`fabric_ray.inference.protocols.DecodeEngine.decode`."""
        if not rows:
            raise InvalidTokens("a step needs at least one row; don't call decode without")
        x = self._run([Segment((row.token,), row.position, row.tables) for row in rows], None)
        return logits(self._model.config, self._model.ranks, self._normed(x))

    def _normed(self, x: Tensor) -> Tensor:
        weights = self._model.ranks[0]["model.norm.weight"]
        return rms_norm(x, weights, self._model.config.norm_eps)

    def _run(self, segments: Sequence[Segment], on_layer: OnLayer | None) -> Tensor:
        """The last layer's output ``[tokens, hidden]``."""
        config, ranks = self._model.config, self._model.ranks
        check_segments(segments, self._groups, config.vocab)
        addresses = [address(segments, group, at) for at, group in enumerate(self._groups)]
        positions = integers([p for s in segments for p in range(s.start, s.end)])
        by = self._angles.at(positions)
        x = embed(ranks, integers([token for s in segments for token in s.tokens]))
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}."
            normed = rms_norm(x, ranks[0][prefix + "input_layernorm.weight"], config.norm_eps)
            where = addresses[self._group_of[layer]]
            projected = [
                self._heads.project(weights, prefix + "self_attn.", normed, by) for weights in ranks
            ]
            for rank, part in enumerate(projected):
                views = self._cache.views(rank, layer)
                for view, values in zip(views, part.kept, strict=True):
                    write(view, where, values)
            if on_layer is not None:
                on_layer(layer)
            x = x + self._attention(layer, prefix + "self_attn.", projected, where)
            after = ranks[0][prefix + "post_attention_layernorm.weight"]
            x = x + feed_forward(config, ranks, layer, rms_norm(x, after, config.norm_eps))
        return x

    def _attention(
        self, layer: int, prefix: str, projected: Sequence[Projected], where: Addresses
    ) -> Tensor:
        parts = []
        for rank, (weights, part) in enumerate(zip(self._model.ranks, projected, strict=True)):
            views = self._cache.views(rank, layer)
            mixed = self._attend(part.queries, views, where)
            parts.append(self._heads.output(weights, prefix, mixed))
        return reduce(parts, self._model.ranks[0].get(prefix + "o_proj.bias"))

    def _attend(self, queries: Tensor, views: Sequence[Tensor], where: Addresses) -> Tensor:
        """Mixed values ``[tokens, heads, width]`` of one rank."""
        mixed: Tensor | None = None
        for bucket in where.buckets:
            kept = tuple(gather(view, bucket, queries.dtype) for view in views)
            k, v = self._heads.keys_values(kept)
            q = queries[bucket.rows].transpose(1, 2)
            out = attend(q, k, v, bucket.mask, self._heads.scale).transpose(1, 2)
            if mixed is None:
                mixed = out.new_empty(len(queries), *out.shape[2:])
            mixed[bucket.rows] = out
        assert mixed is not None, "a batch has segments"
        return mixed
