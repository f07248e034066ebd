"""A layout says where every byte of a cache is, and the engine writes there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric_ray.inference.cache import PagedCache
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.errors import InvalidSpec
from fabric_ray.inference.presets import TINY, tiny
from fabric_ray.inference.spec import ITEMSIZE, CacheSpec, cache_layout
from fabric_ray.kvcache import CacheGroup, CacheTensor
from tests.examples import examples
from tests.unit.inference.engines import engine, followed, text, weights

SPECS = st.builds(
    CacheSpec,
    page_tokens=st.integers(1, 9),
    pages=st.integers(1, 5),
    order=st.sampled_from(["heads_first", "tokens_first", "heads_outermost"]),
    buffers=st.sampled_from(["one", "split", "per_layer"]),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    window_pages=st.sampled_from([None, 2]),
)


def elements(group: CacheGroup, tensor: CacheTensor, layer: int) -> np.ndarray:
    """First bytes of all elements of a layer, ``[pages, heads, tokens, width]``."""
    sizes = (group.pages, tensor.held_heads, group.page_tokens, tensor.width)
    itemsize = ITEMSIZE[tensor.dtype]
    strides = (tensor.page_stride, tensor.head_stride, tensor.token_stride, itemsize)
    grid = np.indices(sizes)
    offsets = sum(index * stride for index, stride in zip(grid, strides, strict=True))
    return np.asarray(tensor.places[layer].offset + offsets)


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(sorted(TINY)), tp=st.sampled_from([1, 2, 4, 8]), spec=SPECS)
def test_every_byte_belongs_to_one_element(name: str, tp: int, spec: CacheSpec) -> None:
    layout = cache_layout(tiny(name), spec, tp=tp, rank=tp - 1, model="m")
    used: list[list[np.ndarray]] = [[] for _ in layout.buffers]
    for group in layout.groups:
        for tensor in group.tensors:
            for at, place in enumerate(tensor.places):
                used[place.buffer].append(elements(group, tensor, at).ravel())
    itemsize = ITEMSIZE[layout.groups[0].tensors[0].dtype]
    for nbytes, offsets in zip(layout.buffers, used, strict=True):
        assert np.array_equal(np.sort(np.concatenate(offsets)), np.arange(0, nbytes, itemsize))


@settings(max_examples=examples(40), deadline=None)
@given(name=st.sampled_from(sorted(TINY)), spec=SPECS)
def test_views_lie_where_the_layout_says(name: str, spec: CacheSpec) -> None:
    layout = cache_layout(tiny(name), spec, tp=2, rank=1, model="m")
    cache = PagedCache([layout, layout])
    for buffer in cache.buffers(1):
        drawn = torch.randint(0, 256, buffer.shape, dtype=torch.uint8)
        buffer.copy_(drawn)
    for group in layout.groups:
        for at, layer in enumerate(group.layers):
            for tensor, view in zip(group.tensors, cache.views(1, layer), strict=True):
                raw = cache.buffers(1)[tensor.places[at].buffer].numpy()
                starts = elements(group, tensor, at)
                bytes_ = raw[starts[..., None] + np.arange(ITEMSIZE[tensor.dtype])]
                found = view.contiguous().view(torch.uint8).numpy()
                assert np.array_equal(found, bytes_.reshape(found.shape))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_hold_all_heads_equally_often(name: str, tp: int) -> None:
    config = tiny(name)
    ranks = [
        cache_layout(config, CacheSpec(dtype="bfloat16"), tp=tp, rank=rank, model="m")
        for rank in range(tp)
    ]
    for kept in range(2):
        tensors = [layout.groups[0].tensors[kept] for layout in ranks]
        held = Counter(
            head for t in tensors for head in range(t.first_head, t.first_head + t.held_heads)
        )
        heads = 1 if config.latent else config.kv_heads
        assert {t.heads for t in tensors} == {heads}
        assert held == dict.fromkeys(range(heads), max(1, tp // heads))
    names = ("latent", "rope") if config.latent else ("k", "v")
    assert tuple(t.name for t in ranks[0].groups[0].tensors) == names


def test_heads_come_first_and_tensors_lie_side_by_side_by_default() -> None:
    k, v = engine("tiny-llama", tp=2).layout(0).groups[0].tensors
    head = 16 * 8 * 8  # tokens, width, bytes
    assert (k.token_stride, k.head_stride, k.page_stride) == (8 * 8, head, 4 * head)
    assert v.places[0].offset - k.places[0].offset == 2 * head


def test_tokens_first_has_all_of_a_token_in_one_run() -> None:
    latent, rope = engine("tiny-mla", order="tokens_first").layout(0).groups[0].tensors
    assert latent.token_stride == rope.token_stride == (32 + 8) * 8
    assert rope.places[0].offset - latent.places[0].offset == 32 * 8


def test_layers_that_look_back_equally_far_are_a_group() -> None:
    full, window = engine("tiny-hybrid", window_pages=5).layout(0).groups
    assert (full.name, full.layers, full.window, full.pages) == ("full", (2,), None, 256)
    assert (window.name, window.layers, window.window, window.pages) == (
        "window",
        (0, 1, 3),
        24,
        5,
    )


def test_every_rank_keeps_the_same_latents() -> None:
    served = engine("tiny-mla", tp=4)
    followed(served, text(30), 25)
    first = served.buffers(0)[0]
    assert first.any()
    assert all(torch.equal(served.buffers(rank)[0], first) for rank in range(4))


def test_memory_comes_from_the_caller() -> None:
    given_: list[tuple[int, Tensor]] = []

    def allocate(rank: int, nbytes: int) -> Tensor:
        given_.append((rank, torch.full((nbytes,), 7, dtype=torch.uint8)))
        return given_[-1][1]

    spec = CacheSpec(pages=4, buffers="split")
    served = TorchEngine(weights("tiny-llama", 2), spec, allocate=allocate)
    assert [rank for rank, _ in given_] == [0, 0, 1, 1]
    for rank in range(2):
        mine = [memory for owner, memory in given_ if owner == rank]
        buffers = served.buffers(rank)
        assert [b.data_ptr() for b in buffers] == [m.data_ptr() for m in mine]
        assert tuple(b.numel() for b in buffers) == served.layout(rank).buffers
    assert not any(memory.any() for _, memory in given_)


def test_memory_of_another_shape_is_refused() -> None:
    for wrong in (
        lambda rank, nbytes: torch.empty(nbytes - 1, dtype=torch.uint8),
        lambda rank, nbytes: torch.empty(nbytes, dtype=torch.int8),
        lambda rank, nbytes: torch.empty(2 * nbytes, dtype=torch.uint8)[::2],
        lambda rank, nbytes: torch.empty(nbytes + 1, dtype=torch.uint8)[1:],
    ):
        with pytest.raises(InvalidSpec, match="give contiguous uint8 of"):
            TorchEngine(weights("tiny-llama"), allocate=wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_tokens", 0),
        ("page_tokens", (1 << 16) + 1),
        ("pages", 1 << 31),
        ("window_pages", 0),
        ("order", "dim_first"),
        ("buffers", "two"),
        ("dtype", "int8"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidSpec, match=f"{field} is") as refused:
        CacheSpec(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
