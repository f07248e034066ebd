"""vLLM's caches as layouts: its tensors are blocks x heads x tokens x content, however they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_groups import LayerGroup, Tables
from fabric_ray.integrations.vllm_kv_probe import PageForm
from fabric_ray.integrations.vllm_kv_states import State
from fabric_ray.kvcache import CacheGroup, CacheLayout, CacheTensor, Place
from fabric_ray.tensors import check_memory

if TYPE_CHECKING:
    import torch


# A number between the dots of a layer's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Bytes of a kind in the name of a layout's group, of which the core takes 256.
_LONGEST_KIND = 200
# More than the number of any layer. vLLM announces no state, and names don't tell when it is
# written: states leave at the end of a pass.
_LATE = 1 << 20


@dataclass(frozen=True)
class Shards:
    """How heads are divided among the ranks of an instance."""

    ranks: int
    rank: int
    """The one that has the tensors."""
    shards: int
    """Distinct parts; consecutive ranks hold the same one where there are fewer than ranks."""
    held_heads: int | None = None
    """Heads of each layer that a rank holds, as far as ``shards`` says how they are divided. Layers
    with another number are moved between as many ranks only (RS-1)."""
    is_stage: bool = False
    """Whether the ranks are those of one stage of a pipeline."""


@dataclass(frozen=True)
class BlockPages:
    """The pages of a layout's group that a block of the scheduler is."""

    group: int
    """The cache group that has the block."""
    per_block: int
    block_tokens: int
    caches: tuple[torch.Tensor, ...] = ()
    """Of each layer, [pages, heads, tokens, content]."""
    by_token: bool = False
    """Whether each token has bytes of its own, the same ones at each place of a page."""


@dataclass(frozen=True)
class WorkerCache:
    """A worker's cache: its memory, and what every rank's looks like."""

    buffers: list[torch.Tensor]
    """All of the memory behind the tensors, as bytes."""
    layouts: list[CacheLayout]
    """Of all ranks: they differ in the heads that they hold."""
    pages: tuple[BlockPages, ...]
    """Of each group of a layout."""
    layers: tuple[str, ...]
    """The layers that have pages of their own, in the order in which they are computed."""
    silent: frozenset[str] = frozenset()
    """Those that vLLM doesn't announce. They are written before the layer after them."""

    def tables(self, blocks: Tables, tokens: int) -> list[list[int]]:
        """The pages of so many tokens, for each group of a layout.

        Args:
            blocks: for each of vLLM's cache groups.
            tokens: of a request.

        Raises:
            InvalidArgument: vLLM has taken a block back that the next token sees (RS-1).
        """
        made = []
        for of, group in zip(self.pages, self.layouts[0].groups, strict=True):
            if group.is_state:
                block = blocks[of.group][-(-tokens // of.block_tokens) - 1]
                if block == 0:
                    raise InvalidArgument(
                        f"group {group.name}: vLLM has no state after {tokens} tokens; report this "
                        "with vLLM's version"
                    )
                made.append([block])
                continue
            if group.window is not None:
                seen = max(0, tokens - group.window) // (of.per_block * group.page_tokens)
                if 0 in blocks[of.group][seen:]:
                    raise InvalidArgument(
                        f"group {group.name}: vLLM has taken back a block that the token after "
                        f"{tokens} others sees; report this with vLLM's version"
                    )
            pages = [b * of.per_block + i for b in blocks[of.group] for i in range(of.per_block)]
            made.append(pages[: -(-tokens // group.page_tokens)])
        return made

    def clear_rest(self, blocks: Tables, tokens: int) -> None:
        """Zeroes what the last block of attention's groups has beyond so many tokens. vLLM does so
        with blocks that it gives out where other groups leave in them what would be no numbers."""
        for of, group in zip(self.pages, self.layouts[0].groups, strict=True):
            if group.is_state:
                continue
            last = -(-tokens // of.block_tokens) - 1
            first, used = divmod(tokens - last * of.block_tokens, group.page_tokens)
            begin, end = (blocks[of.group][last] * of.per_block + i for i in (first, of.per_block))
            for cache in of.caches:
                cache[begin + (used > 0) : end].zero_()
                if used and of.by_token:
                    cache[begin, :, used:].zero_()


def worker_cache(
    tensors: Mapping[str, torch.Tensor],
    *,
    groups: Sequence[LayerGroup],
    shards: Shards,
    model: str,
    form: Callable[[str], PageForm],
    shared: Mapping[str, str] | None = None,
) -> WorkerCache:
    """What vLLM registers, described.

    Args:
        tensors: the cache of each layer, [blocks, heads, tokens, content]; layers that share one
            have it under several names.
        groups: vLLM's cache groups. Blocks are of tokens as the scheduler counts them; the kernels'
            may be smaller. Layers of two groups may lie in the same memory, for a block is of one
            group at a time.
        shards: the shards of the caches.
        model: what the pages are of.
        form: what is known of the pages of a layer. Ends whose pages can't be divided are paired
            with pages of the same size only (RS-1).
        shared: layers that read another layer's cache, and that layer.

    Raises:
        InvalidArgument: a tensor that isn't laid out so.
    """
    members = _members(tensors, groups, shared or {})
    if not any(members):
        raise InvalidArgument("vLLM registered no caches; a model without attention has none")
    buffers: list[torch.Tensor] = []
    places = {name: _place(tensors[name], buffers) for names in members for name in names}
    described: list[CacheGroup] = []
    pages: list[BlockPages] = []
    order: list[tuple[int, int, str]] = []
    for alike in _alike(tensors, members, groups):
        names, of = sorted(alike.numbers, key=alike.numbers.__getitem__), groups[alike.group]
        t = tensors[names[0]]
        lie = tuple(places[name] for name in names)
        known = None if of.is_state else form(names[0])
        if known is None:
            parts = tuple(_states(t, of.states[names[0]], shards.ranks, lie))
        else:
            parts = (_tensor(t, known, shards, lie),)
        window = "" if of.window is None else f", sliding window of {of.window}"
        order += [(alike.numbers[name], len(described), name) for name in names]
        described.append(
            CacheGroup(
                name=f"{alike.kind[:_LONGEST_KIND]}{window}",
                layers=tuple(alike.numbers[name] for name in names),
                page_tokens=t.shape[2],
                pages=t.shape[0],
                tensors=parts,
                # Of the tokens before the next one, that sees itself too.
                window=of.look_back,
                block_tokens=None if of.is_state else of.block_tokens,
                is_state=of.is_state,
            )
        )
        per_block = 1 if of.is_state else of.block_tokens // t.shape[2]
        caches = tuple(tensors[name] for name in names)
        by_token = known is not None and known.tokens
        pages.append(BlockPages(alike.group, per_block, of.block_tokens, caches, by_token))
    sizes = tuple(buffer.numel() for buffer in buffers)
    layout = CacheLayout(model, tuple(described), sizes, shards.is_stage)
    return WorkerCache(
        buffers=buffers,
        layouts=[_of_rank(layout, rank, shards.ranks) for rank in range(shards.ranks)],
        pages=tuple(pages),
        layers=tuple(name for *_, name in sorted(order)),
        silent=frozenset().union(*(group.silent for group in groups)),
    )


@dataclass(frozen=True)
class _Alike:
    """Layers that one group of a layout describes."""

    group: int
    """The cache group that has their blocks."""
    kind: str
    """Their name, with `*` for its first number."""
    numbers: Mapping[str, int]
    """Of each layer, by its name."""


def _alike(
    tensors: Mapping[str, torch.Tensor],
    members: Sequence[Sequence[str]],
    groups: Sequence[LayerGroup],
) -> list[_Alike]:
    """Layers of one kind and form, in an order that both ends find, whatever order vLLM registers
    caches in: ends pair layers by their kind and number (RS-1)."""
    found: dict[tuple[int, str, tuple[object, ...]], dict[str, int]] = {}
    for index, names in enumerate(members):
        late = _LATE if groups[index].is_state else 0
        for name in names:
            t = tensors[name]
            form = (tuple(t.shape), t.stride(), t.dtype)
            kind, number = _numbered(name)
            found.setdefault((index, kind, form), {})[name] = late + number
    alike = [_Alike(index, kind, numbers) for (index, kind, _), numbers in found.items()]

    def order(each: _Alike) -> tuple[str, list[int], int, int, str]:
        numbers, window = each.numbers, groups[each.group].window or 0
        others = [int(part) for part in _NUMBER.findall(each.kind)]
        return _NUMBER.sub("*", each.kind), others, window, min(numbers.values()), min(numbers)

    return sorted(alike, key=order)


def _members(
    tensors: Mapping[str, torch.Tensor], groups: Sequence[LayerGroup], shared: Mapping[str, str]
) -> list[list[str]]:
    """The layers of each group that have caches of their own."""
    group_of = {name: i for i, group in enumerate(groups) for name in group.layers}
    own: list[dict[tuple[int, tuple[int, ...]], str]] = [{} for _ in groups]
    for name, tensor in tensors.items():
        group = group_of.get(shared.get(name, name))
        if group is None:
            raise InvalidArgument(
                f"the cache of `{name}` is of none of vLLM's cache groups; serve this model "
                "without the connector"
            )
        _check(name, tensor, groups[group])
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if name not in shared:
            own[group].setdefault(key, name)
    for name, other in shared.items():
        if name in tensors and not _same(tensors[name], tensors.get(other)):
            raise InvalidArgument(
                f"layer `{name}` reads the cache of `{other}`, and has another; serve this model "
                "without the connector"
            )
    return [list(each.values()) for each in own]


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def _tensor(
    t: torch.Tensor, form: PageForm, shards: Shards, places: tuple[Place, ...]
) -> CacheTensor:
    _, heads, tokens, width = t.shape
    page, head, token, _ = (stride * t.element_size() for stride in t.stride())
    # Where there is one head, its stride means nothing and depends on the memory order.
    strides = tuple(s if n > 1 else 0 for s, n in zip(t.stride()[1:], t.shape[1:], strict=True))
    name = form.name(heads=heads, tokens=tokens, strides=strides)
    divided = shards.shards
    if shards.held_heads not in (None, heads):
        # How its heads are divided isn't known: rank by rank, between as many ranks.
        divided, name = shards.ranks, f"{name}, of {shards.ranks} ranks"
    return CacheTensor(
        name=name,
        heads=heads * divided,
        first_head=0,
        held_heads=heads,
        width=width,
        dtype=str(t.dtype).removeprefix("torch."),
        page_stride=page,
        head_stride=head,
        token_stride=token,
        places=places,
    )


def _states(
    t: torch.Tensor, state: State, ranks: int, places: tuple[Place, ...]
) -> Iterator[CacheTensor]:
    for part, divided in state.divided(ranks):
        yield CacheTensor(
            name=f"state, {part.name}",
            heads=part.heads * divided,
            first_head=0,
            held_heads=part.heads,
            width=part.width,
            dtype="uint8",
            page_stride=t.stride(0) * t.element_size(),
            head_stride=part.width,
            token_stride=0,
            places=tuple(Place(place.buffer, place.offset + part.offset) for place in places),
        )


def _check(name: str, tensor: torch.Tensor, group: LayerGroup) -> None:
    shape, block_tokens = tuple(tensor.shape), group.block_tokens
    check_memory(f"the cache of `{name}`", tensor)
    if (state := group.states.get(name)) is not None:
        if shape[1:-1] != (1, 1) or shape[-1] * tensor.element_size() != state.nbytes:
            raise InvalidArgument(
                f"the cache of `{name}` has shape {shape} of {tensor.dtype}, not [blocks, 1, 1, "
                f"{state.nbytes} bytes]; use vLLM 0.32 or later, or serve this model without the "
                "connector"
            )
        return
    if tensor.ndim != 4:
        raise InvalidArgument(
            f"the cache of `{name}` has shape {shape}, not [blocks, heads, tokens, content]; only "
            "attention caches are moved"
        )
    if tensor.stride(3) != 1:
        raise InvalidArgument(
            f"the cache of `{name}` has strides {tensor.stride()}: one token's content is in "
            "pieces; choose another VLLM_KV_CACHE_LAYOUT"
        )
    if shape[2] == 0 or block_tokens % shape[2]:
        raise InvalidArgument(
            f"the cache of `{name}` has {shape[2]} tokens in a page, which don't divide blocks of "
            f"{block_tokens}; choose another --block-size"
        )


def _numbered(name: str) -> tuple[str, int]:
    """The kind and the number of a layer. They name it alone, whatever other layers an end or a
    stage of a pipeline has (RS-1)."""
    first = _NUMBER.search(name)
    if first is None:
        return name, 0
    return f"{name[: first.start()]}*{name[first.end() :]}", int(first.group())


def _place(tensor: torch.Tensor, buffers: list[torch.Tensor]) -> Place:
    import torch

    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    for i, buffer in enumerate(buffers):
        if buffer.data_ptr() == storage.data_ptr():
            return Place(i, offset)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    buffers.append(whole)
    return Place(len(buffers) - 1, offset)


def _of_rank(layout: CacheLayout, rank: int, ranks: int) -> CacheLayout:
    groups = []
    for group in layout.groups:
        held = tuple(_held(tensor, rank, ranks) for tensor in group.tensors)
        groups.append(msgspec.structs.replace(group, tensors=held))
    return msgspec.structs.replace(layout, groups=tuple(groups))


def _held(tensor: CacheTensor, rank: int, ranks: int) -> CacheTensor:
    parts = tensor.heads // tensor.held_heads
    first = rank * parts // ranks * tensor.held_heads
    return msgspec.structs.replace(tensor, first_head=first)
