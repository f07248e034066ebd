"""vLLM's caches as layouts: its tensors are blocks x heads x tokens x content, however they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_probe import PageForm
from fabric_ray.kvcache import CacheGroup, CacheLayout, CacheTensor, Place
from fabric_ray.tensors import check_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shards:
    """How heads are divided among the ranks of an instance."""

    ranks: int
    rank: int
    """The one that has the tensors."""
    shards: int
    """Distinct parts; consecutive ranks hold the same one where there are fewer than ranks."""

    def part(self, rank: int) -> int:
        """Which part a rank holds."""
        return rank * self.shards // self.ranks


@dataclass(frozen=True)
class WorkerCache:
    """A worker's cache: its memory, and what every rank's looks like."""

    buffers: list[torch.Tensor]
    """All of the memory behind the tensors, as bytes."""
    layouts: list[CacheLayout]
    """Of all ranks: they differ in the heads that they hold."""
    ratios: tuple[int, ...]
    """Pages of each group that one block of the scheduler is."""
    layers: tuple[str, ...]
    """The layers that have pages of their own, in the order in which they are computed."""

    def tables(self, blocks: Sequence[int], tokens: int) -> list[list[int]]:
        """The pages of so many tokens, for each group."""
        made = []
        for ratio, group in zip(self.ratios, self.layouts[0].groups, strict=True):
            pages = [block * ratio + i for block in blocks for i in range(ratio)]
            made.append(pages[: -(-tokens // group.page_tokens)])
        return made


def worker_cache(
    tensors: Mapping[str, torch.Tensor],
    *,
    block_tokens: int,
    shards: Shards,
    model: str,
    form: Callable[[str], PageForm],
) -> WorkerCache:
    """What vLLM registers, described.

    Args:
        tensors: the cache of each layer, [blocks, heads, tokens, content]; layers that share one
            have it under several names.
        block_tokens: of a block as the scheduler counts them; the kernels' may be smaller.
        shards: the shards of the caches.
        model: what the pages are of.
        form: what is known of the pages of a layer. Ends whose pages can't be divided are paired
            with pages of the same size only (RS-1).

    Raises:
        InvalidArgument: a tensor that isn't laid out so.
    """
    own: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        _check(name, tensor, block_tokens)
        own.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    names = list(own.values())
    if not names:
        raise InvalidArgument("vLLM registered no caches; a model without attention has none")
    numbers = _numbers(names)
    buffers: list[torch.Tensor] = []
    places: dict[str, Place] = {}
    for name in names:
        places[name] = _place(tensors[name], buffers)
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(names, key=numbers.__getitem__):
        t = tensors[name]
        alike.setdefault((tuple(t.shape), t.stride(), t.dtype), []).append(name)
    groups = []
    for i, members in enumerate(alike.values()):
        t = tensors[members[0]]
        pages, heads, tokens, width = t.shape
        page, head, token, _ = (stride * t.element_size() for stride in t.stride())
        described = CacheTensor(
            name=form(members[0]).name(heads=heads, tokens=tokens, strides=t.stride()[1:]),
            heads=heads * shards.shards,
            first_head=0,
            held_heads=heads,
            width=width,
            dtype=str(t.dtype).removeprefix("torch."),
            page_stride=page,
            head_stride=head,
            token_stride=token,
            places=tuple(places[name] for name in members),
        )
        layers = tuple(numbers[name] for name in members)
        groups.append(CacheGroup(str(i), layers, tokens, pages, (described,)))
    layout = CacheLayout(model, tuple(groups), tuple(b.numel() for b in buffers))
    return WorkerCache(
        buffers=buffers,
        layouts=[_of_rank(layout, shards.part(rank)) for rank in range(shards.ranks)],
        ratios=tuple(block_tokens // group.page_tokens for group in groups),
        layers=tuple(sorted(names, key=numbers.__getitem__)),
    )


def _check(name: str, tensor: torch.Tensor, block_tokens: int) -> None:
    shape = tuple(tensor.shape)
    check_memory(f"the cache of `{name}`", tensor)
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


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """Numbers of layers: those in their names where they tell them apart, else their order."""
    found = {
        name: [int(part) for part in re.findall(r"(?<=\.)\d+(?=\.|$)", name)] for name in names
    }
    single = [parts[0] for parts in found.values() if len(parts) == 1]
    if len(set(single)) == len(names):
        return {name: parts[0] for name, parts in found.items()}
    return {name: i for i, name in enumerate(names)}


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


def _of_rank(layout: CacheLayout, part: int) -> CacheLayout:
    groups = []
    for group in layout.groups:
        (tensor,) = group.tensors
        first = part * tensor.held_heads
        held = msgspec.structs.replace(tensor, first_head=first)
        groups.append(msgspec.structs.replace(group, tensors=(held,)))
    return msgspec.structs.replace(layout, groups=tuple(groups))
