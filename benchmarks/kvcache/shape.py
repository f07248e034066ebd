"""How the harness' pages lie as a paged cache: which layer and page each of them is."""

from __future__ import annotations

import msgspec
import numpy as np
from typing_extensions import Self

from benchmarks.harness.cases import KIB, MIB, Case, Link
from benchmarks.harness.data import Bytes, Indices, order, pages_in, pattern
from fabric_ray.kvcache import CacheGroup, CacheLayout, CacheTensor, Place

_ROW_ELEMENTS = 512
_LAYERS = 16
# 4096 tokens of DeepSeek-R1: 61 layers, 128 tokens a page, 576 values of 2 bytes a token.
_R1_LAYERS, _R1_PAGES, _R1_TOKENS, _R1_WIDTH = 61, 32, 128, 576
_R1 = "deepseek-r1-4k"


class Shape(msgspec.Struct, frozen=True):
    """A cache of one group and one tensor; a page of a layer is one page of the case."""

    layers: int
    layer_pages: int
    """Of one operation, in each layer."""
    held_pages: int
    """That there are, in each layer."""
    page_tokens: int
    width: int
    """Elements of a token, 2 bytes each."""

    @classmethod
    def of(cls, case: Case) -> Self:
        """How a case's pages are shared among layers."""
        if case.label == _R1:
            layers, tokens, width = _R1_LAYERS, _R1_TOKENS, _R1_WIDTH
        else:
            layers, width = min(_LAYERS, case.pages), _ROW_ELEMENTS
            tokens = case.bytes // (2 * width)
        if 2 * tokens * width != case.bytes or case.pages % layers:
            raise ValueError(
                f"{case.pages} pages of {case.bytes} bytes can't be {layers} layers of "
                f"{width} elements a token; choose multiples"
            )
        return cls(layers, case.pages // layers, pages_in(case) // layers, tokens, width)

    @property
    def page_nbytes(self) -> int:
        return 2 * self.page_tokens * self.width

    @property
    def nbytes(self) -> int:
        return self.layers * self.held_pages * self.page_nbytes

    @property
    def tokens(self) -> int:
        """Of one operation."""
        return self.layer_pages * self.page_tokens

    def layout(self) -> CacheLayout:
        page = self.page_nbytes
        places = tuple(Place(0, layer * self.held_pages * page) for layer in range(self.layers))
        row = 2 * self.width
        tensor = CacheTensor("latent", 1, 0, 1, self.width, "bfloat16", page, page, row, places)
        layers = tuple(range(self.layers))
        group = CacheGroup("all", layers, self.page_tokens, self.held_pages, (tensor,))
        return CacheLayout("bench", (group,), (self.nbytes,))

    def tables(self, number: int) -> tuple[list[int], list[int]]:
        """Page tables of operation `number`: of the source in order, of the target shuffled."""
        first = number % max(1, self.held_pages // self.layer_pages) * self.layer_pages
        source = list(range(first, first + self.layer_pages))
        target: list[int] = order(self.held_pages)[source].tolist()
        return source, target

    def fault(self, operations: int, memory: Bytes) -> str | None:
        """None if `operations` operations into zeroed memory left exactly their bytes there, or a
        sentence. The memory is zero afterwards where they belong."""
        shape = (self.layers, self.held_pages, self.page_nbytes)
        wanted, found = pattern(memory.size)[: self.nbytes].reshape(shape), memory[: self.nbytes]
        pages = found.reshape(shape)
        tables = [self.tables(number) for number in range(operations)]
        for source, target in tables:
            for layer in range(self.layers):
                for origin, place in zip(source, target, strict=True):
                    if not np.array_equal(pages[layer, place], wanted[layer, origin]):
                        return f"page {origin} of layer {layer} is not in page {place}"
        for _, target in tables:
            pages[:, np.asarray(target, dtype=np.int64)] = 0
        stray: Indices = np.flatnonzero(memory.view(np.uint64))
        if stray.size:
            return f"bytes were written where none belong, near offset {int(stray[0]) * 8}"
        return None


def page_cases(quick: bool) -> list[Case]:
    """Pages of 32 and 64 KiB over shared memory and TCP, 1024 of them in an operation."""
    links: tuple[Link, ...] = ("shm", "tcp")
    count, region = (64, 16 * MIB) if quick else (1024, 256 * MIB)
    return [
        Case(suite="kv", operation="pages", link=link, bytes=size, pages=count, region=region)
        for link in links
        for size in (32 * KIB, 64 * KIB)
    ]


def r1_cases(quick: bool) -> list[Case]:
    """The pages of one prompt of 4096 tokens."""
    links: tuple[Link, ...] = ("shm",) if quick else ("shm", "tcp")
    count, size = _R1_LAYERS * _R1_PAGES, 2 * _R1_TOKENS * _R1_WIDTH
    region = count * size
    return [
        Case(
            suite="kv",
            operation="pages",
            link=link,
            bytes=size,
            pages=count,
            region=region,
            label=_R1,
        )
        for link in links
    ]
