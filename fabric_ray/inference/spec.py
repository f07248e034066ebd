"""How a rank's cache is laid out in memory: which tensors, in which order, in how many buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import msgspec

from fabric_ray.inference.errors import InvalidSpec
from fabric_ray.kvcache.layout import CacheGroup, CacheLayout, CacheTensor, Place
from fabric_ray.models.config import ModelConfig

Order = Literal["heads_first", "tokens_first", "heads_outermost"]
"""How a tensor's dimensions follow each other in memory; an element's width is always innermost.

- ``heads_first``: pages, heads, tokens: what one head has of a page is one run;
- ``tokens_first``: pages, tokens, heads: all that a page has of one token is one run;
- ``heads_outermost``: heads, pages, tokens.
"""

Buffers = Literal["one", "split", "per_layer"]
"""``one`` for everything; ``split``: one for each tensor (keys, values); or one for each layer."""

CacheDType = Literal["float64", "float32", "bfloat16", "float16"]

MAX_PAGE_TOKENS = 1 << 16
MAX_PAGES = (1 << 31) - 1

ITEMSIZE: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class CacheSpec(msgspec.Struct, frozen=True):
    """What the user chooses about a cache.

    Raises:
        InvalidSpec: a size is not positive, or a choice unknown.
    """

    page_tokens: int = 16
    pages: int = 256
    """Of each group."""
    order: Order = "heads_first"
    buffers: Buffers = "one"
    dtype: CacheDType | None = None
    """The model's by default."""
    window_pages: int | None = None
    """Of groups with a window, where they need fewer."""

    def __post_init__(self) -> None:
        for field, most in (
            ("page_tokens", MAX_PAGE_TOKENS),
            ("pages", MAX_PAGES),
            ("window_pages", MAX_PAGES),
        ):
            size = getattr(self, field)
            if size is not None and not 1 <= size <= most:
                raise InvalidSpec(f"{field} is {size}; give 1 to {most}", field=field)
        for field, choices in (
            ("order", get_args(Order)),
            ("buffers", get_args(Buffers)),
            ("dtype", (None, *ITEMSIZE)),
        ):
            if getattr(self, field) not in choices:
                raise InvalidSpec(
                    f"{field} is {getattr(self, field)!r}; use one of "
                    f"{', '.join(str(choice) for choice in choices)}",
                    field=field,
                )


class Kept(msgspec.Struct, frozen=True):
    """A tensor that attention keeps of each token on one rank."""

    name: str
    heads: int
    first_head: int
    held_heads: int
    width: int


def kept_by(config: ModelConfig, *, tp: int, rank: int) -> tuple[Kept, ...]:
    """What rank ``rank`` of ``tp`` keeps: its key/value heads, which neighbours share where there
    are fewer heads than ranks; or latents, alike on all ranks (DeepSeek-V2, section 2.1)."""
    if (latent := config.latent) is not None:
        return (
            Kept("latent", 1, 0, 1, latent.kv_rank),
            Kept("rope", 1, 0, 1, latent.rope_dim),
        )
    heads = config.kv_heads
    held, first = max(1, heads // tp), rank * heads // tp
    return tuple(Kept(name, heads, first, held, config.head_dim) for name in ("k", "v"))


def layers_by_window(config: ModelConfig) -> dict[int | None, tuple[int, ...]]:
    """Layers that look back equally far; those that see everything first."""
    windowed = config.windowed_layers
    full = tuple(layer for layer in range(config.layers) if layer not in windowed)
    groups: dict[int | None, tuple[int, ...]] = {}
    if full:
        groups[None] = full
    if windowed:
        groups[config.window] = tuple(sorted(windowed))
    return groups


def cache_layout(
    config: ModelConfig, spec: CacheSpec, *, tp: int, rank: int, model: str
) -> CacheLayout:
    """The layout of one rank's cache; nothing is padded.

    Args:
        config: the model.
        spec: what the user chose; its dtype must be known.
        tp: tensor-parallel ranks.
        rank: 0 to ``tp - 1``.
        model: fingerprint of the engine.
    """
    if spec.dtype is None:
        raise InvalidSpec("the cache has no dtype; give the model's", field="dtype")
    kept = kept_by(config, tp=tp, rank=rank)
    memory = _Memory(spec.buffers)
    groups = []
    for window, layers in layers_by_window(config).items():
        pages = spec.pages if window is None else spec.window_pages or spec.pages
        tensors = tuple(_tensors(kept, spec, spec.dtype, pages, layers, memory))
        groups.append(
            CacheGroup(
                name="full" if window is None else "window",
                layers=layers,
                page_tokens=spec.page_tokens,
                pages=pages,
                tensors=tensors,
                window=window,
            )
        )
    return CacheLayout(model=model, groups=tuple(groups), buffers=tuple(memory.lengths))


class _Memory:
    """Buffers that grow as places in them are handed out."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._numbers: dict[object, int] = {}
        self.lengths: list[int] = []

    def place(self, layer: int, tensor: str, nbytes: int) -> Place:
        key = {"one": None, "split": tensor, "per_layer": layer}[self._buffers]
        number = self._numbers.setdefault(key, len(self.lengths))
        if number == len(self.lengths):
            self.lengths.append(0)
        place = Place(buffer=number, offset=self.lengths[number])
        self.lengths[number] += nbytes
        return place


def _tensors(
    kept: Sequence[Kept],
    spec: CacheSpec,
    dtype: str,
    pages: int,
    layers: Sequence[int],
    memory: _Memory,
) -> Iterator[CacheTensor]:
    if len(kept) > 1 and (spec.buffers == "split" or spec.order == "heads_outermost"):
        for one in kept:
            yield from _tensors([one], spec, dtype, pages, layers, memory)
        return
    # Tensors in one buffer lie side by side within a page (or a token), so that one run moves all.
    rows = [k.width * ITEMSIZE[dtype] for k in kept]  # bytes of one head of one token
    token = sum(k.held_heads * row for k, row in zip(kept, rows, strict=True))
    page = spec.page_tokens * token
    starts = [memory.place(layer, kept[0].name, pages * page) for layer in layers]
    ahead = 0
    for k, row in zip(kept, rows, strict=True):
        head = spec.page_tokens * row
        page_stride, head_stride, token_stride = {
            "heads_first": (page, head, row),
            "tokens_first": (page, row, token),
            "heads_outermost": (head, pages * head, row),
        }[spec.order]
        yield CacheTensor(
            **msgspec.structs.asdict(k),
            dtype=dtype,
            page_stride=page_stride,
            head_stride=head_stride,
            token_stride=token_stride,
            places=tuple(Place(start.buffer, start.offset + ahead) for start in starts),
        )
        ahead += k.held_heads * (row if spec.order == "tokens_first" else head)
