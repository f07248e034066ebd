"""An engine as a user may bring one: the token that follows is the sum of all before it, modulo
the vocabulary. It reads them from its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric_ray.inference import CacheSpec, DecodeRow, PageTable, PrefillChunk, Tail, TailLayout
from fabric_ray.inference.tail import read_tail, write_tail
from fabric_ray.kvcache.layout import CacheGroup, CacheLayout, CacheTensor, Place
from fabric_ray.serve import ServeArgs

VOCAB = 258
STOP = 257
"""What ends a text of bytes."""
_WIDTH = 8
"""Bytes of a float64."""


class SumEngine:
    """One layer, whose only tensor has each token's number."""

    fingerprint = "sums of tokens"
    ranks = 1
    tail = TailLayout(VOCAB, 1, "float64", _WIDTH)

    def __init__(self, spec: CacheSpec, memory: Tensor) -> None:
        self._page_tokens, self._memory = spec.page_tokens, memory
        self._pages = memory.view(torch.float64).view(spec.pages, spec.page_tokens)
        page = spec.page_tokens * _WIDTH
        tensor = CacheTensor(
            *("token", 1, 0, 1, 1, "float64"),
            page_stride=page,
            head_stride=page,
            token_stride=_WIDTH,
            places=(Place(0, 0),),
        )
        group = CacheGroup("all", (0,), spec.page_tokens, spec.pages, (tensor,))
        self._layout = CacheLayout(self.fingerprint, (group,), (memory.nbytes,))

    def layout(self, rank: int) -> CacheLayout:
        return self._layout

    def buffers(self, rank: int) -> Sequence[Tensor]:
        return (self._memory,)

    def prefill(self, chunk: PrefillChunk, on_layer: Any = None) -> Tail | None:
        (table,) = chunk.tables
        for position, token in enumerate(chunk.tokens, chunk.start):
            self._write(table, position, token)
        if on_layer is not None:
            on_layer(0)
        end = chunk.start + len(chunk.tokens)
        hidden = torch.zeros(1, dtype=torch.float64, device="cpu")
        return Tail(self._logits(table, end), hidden) if chunk.last else None

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        for row in rows:
            self._write(row.tables[0], row.position, row.token)
        return torch.stack([self._logits(row.tables[0], row.position + 1) for row in rows])

    def write_tail(self, tail: Tail, into: Tensor) -> None:
        write_tail(self.tail, tail, into)

    def read_tail(self, source: Tensor) -> Tail:
        return read_tail(self.tail, source)

    def _write(self, table: PageTable, position: int, token: int) -> None:
        page, at = divmod(position, self._page_tokens)
        self._pages[table[page], at] = token

    def _logits(self, table: PageTable, end: int) -> Tensor:
        seen = self._pages[list(table)].flatten()[:end]
        logits = torch.zeros(VOCAB, dtype=torch.float64, device="cpu")
        logits[int(seen.sum()) % VOCAB] = 1.0
        return logits


def make(args: ServeArgs, *, role: str, tp: int, spec: CacheSpec, allocate: Any) -> SumEngine:
    """Prefillers take memory that the deployment has; decoders bring theirs."""
    nbytes = spec.pages * spec.page_tokens * _WIDTH
    if role == "prefill":
        return SumEngine(spec, allocate(0, nbytes))
    return SumEngine(spec, torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))


def expected(prompt: Sequence[int], count: int, *, stop: int | None = STOP) -> list[int]:
    """What it generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]
