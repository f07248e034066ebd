"""A paged cache in memory that the caller brings, as its layouts describe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fabric_ray.inference.errors import InvalidSpec
from fabric_ray.inference.spec import ITEMSIZE
from fabric_ray.kvcache.layout import CacheLayout, CacheTensor
from fabric_ray.tensors import check_memory

Allocate = Callable[[int, int], Tensor]
"""``allocate(rank, nbytes)`` gives uint8 memory, ``[nbytes]``, for one of a rank's buffers."""


def host_memory(rank: int, nbytes: int) -> Tensor:
    """Memory that no peer can reach, for engines without transfers."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class PagedCache:
    """The caches of all ranks of an engine.

    Memory is zeroed: what lies in a page before its tokens do must at least be numbers.

    Args:
        layouts: one for each rank.
        allocate: where memory comes from; asked once for each buffer, in order.

    Raises:
        InvalidSpec: memory isn't as asked for.
    """

    def __init__(self, layouts: Sequence[CacheLayout], allocate: Allocate = host_memory) -> None:
        self.layouts = tuple(layouts)
        self._buffers = tuple(
            tuple(_checked(allocate(rank, nbytes), rank, nbytes) for nbytes in layout.buffers)
            for rank, layout in enumerate(layouts)
        )
        self._views = [
            {
                layer: tuple(
                    _view(buffers, tensor, group.pages, group.page_tokens, at)
                    for tensor in group.tensors
                )
                for group in layout.groups
                for at, layer in enumerate(group.layers)
            }
            for layout, buffers in zip(self.layouts, self._buffers, strict=True)
        ]

    def buffers(self, rank: int) -> tuple[Tensor, ...]:
        """A rank's memory, uint8, as ``layout.buffers`` counts it."""
        return self._buffers[rank]

    def views(self, rank: int, layer: int) -> tuple[Tensor, ...]:
        """What a rank keeps of a layer, ``[pages, heads, tokens, width]`` each."""
        return self._views[rank][layer]


def _view(
    buffers: Sequence[Tensor], tensor: CacheTensor, pages: int, page_tokens: int, at: int
) -> Tensor:
    place = tensor.places[at]
    itemsize = ITEMSIZE[tensor.dtype]
    elements = buffers[place.buffer].view(getattr(torch, tensor.dtype))
    strides = (tensor.page_stride, tensor.head_stride, tensor.token_stride)
    return elements.as_strided(
        (pages, tensor.held_heads, page_tokens, tensor.width),
        (*(stride // itemsize for stride in strides), 1),
        elements.storage_offset() + place.offset // itemsize,
    )


def _checked(memory: Tensor, rank: int, nbytes: int) -> Tensor:
    check_memory(f"the memory that allocate(rank={rank}, nbytes={nbytes}) gave", memory)
    good = memory.dtype == torch.uint8 and tuple(memory.shape) == (nbytes,)
    if not good or not memory.is_contiguous() or memory.data_ptr() % 8:
        raise InvalidSpec(
            f"allocate(rank={rank}, nbytes={nbytes}) gave {memory.dtype} of shape "
            f"{list(memory.shape)} at {memory.data_ptr():#x}; give contiguous uint8 of {nbytes} "
            "bytes, aligned to 8",
            field="allocate",
        )
    if memory.storage_offset() % 8:
        # torch views bytes as wider elements only at multiples of them within the storage.
        raise InvalidSpec(
            f"allocate(rank={rank}, nbytes={nbytes}) gave a part of a tensor that begins at byte "
            f"{memory.storage_offset()}; begin parts at multiples of 8",
            field="allocate",
        )
    return memory.zero_()
