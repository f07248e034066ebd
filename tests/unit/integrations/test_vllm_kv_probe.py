"""RS-1: pages whose bytes aren't ordered by tokens and heads are moved whole, or not at all."""

from __future__ import annotations

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_layout import Shards, worker_cache
from fabric_ray.integrations.vllm_kv_probe import PageForm, page_form
from fabric_ray.kvcache import CacheLayout, Decoder, Prefiller, RankCache
from fabric_ray.kvcache.errors import LayoutMismatch
from tests import kv_pages
from tests.kv_pages import Write

BLOCKS, HEADS, TOKENS, CONTENT = 3, 4, 8, 32
LAYER = "model.layers.0.attn"


def form_of(write: Write, cache: torch.Tensor | None = None) -> PageForm:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) if cache is None else cache
    layer = kv_pages.attention(cache, cache.shape[1], write)
    return page_form(LAYER, layer, cache, torch.float32)


@pytest.mark.parametrize(
    ("write", "tokens", "heads"),
    [
        (kv_pages.by_rows, True, True),
        (kv_pages.by_lanes, False, True),
        (kv_pages.by_scattered_heads, True, False),
        (kv_pages.by_shifted_rows, False, True),
        (kv_pages.by_small_pages, False, False),
        (kv_pages.nowhere, False, False),
        (kv_pages.refused, False, False),
    ],
)
def test_rs_1_a_probe_tells_what_has_bytes_of_its_own(
    write: Write, tokens: bool, heads: bool
) -> None:
    found = form_of(write)
    assert (found.tokens, found.heads) == (tokens, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_probe_leaves_the_cache_as_it_was(dtype: torch.dtype, heads_first: bool) -> None:
    cache = torch.randn(BLOCKS, HEADS, TOKENS, CONTENT).to(dtype)
    if not heads_first:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    before = cache.float().clone()
    found = form_of(kv_pages.by_rows, cache)
    assert (found.tokens, found.heads) == (True, True)
    assert torch.equal(cache.float(), before)


def test_latent_caches_are_probed_and_unknown_layers_are_not_divided() -> None:
    cache = torch.zeros(BLOCKS, 1, TOKENS, 24)
    found = page_form(LAYER, kv_pages.latent(cache, 16), cache, torch.float32)
    assert (found.tokens, found.heads) == (True, True)
    for unknown in (None, object()):
        assert not page_form(LAYER, unknown, cache, torch.float32).tokens


def layouts(write: Write, *, tokens: int, ranks: int = 1) -> list[CacheLayout]:
    cache = torch.zeros(BLOCKS, HEADS // ranks, tokens, CONTENT)
    made = worker_cache(
        {LAYER: cache},
        groups=[LayerGroup(tokens, (LAYER,))],
        shards=Shards(ranks=ranks, rank=0, shards=ranks),
        model="m",
        form=lambda _: form_of(write, cache),
    )
    return made.layouts


def paired(source: list[CacheLayout], target: list[CacheLayout]) -> None:
    """Has a decoder meet a prefiller.

    Raises:
        LayoutMismatch: their caches don't fit.
    """

    def ranks(layouts: list[CacheLayout], engine: TransferEngine) -> list[RankCache]:
        return [
            RankCache(
                engine, layout, [engine.register(torch.zeros(layout.buffers[0], dtype=torch.uint8))]
            )
            for layout in layouts
        ]

    with (
        TransferEngine(name="p") as ours,
        TransferEngine(name="d") as theirs,
        Prefiller(ranks(source, ours)) as prefiller,
        Decoder(ranks(target, theirs)) as decoder,
    ):
        decoder.connect(prefiller.offer())


PAIRS = [
    (kv_pages.by_rows, {"tokens": 16, "ranks": 2}, True),
    (kv_pages.by_lanes, {"tokens": 8, "ranks": 2}, True),
    (kv_pages.by_lanes, {"tokens": 16}, False),
    (kv_pages.by_scattered_heads, {"tokens": 16}, True),
    (kv_pages.by_scattered_heads, {"tokens": 8, "ranks": 2}, False),
    (kv_pages.refused, {"tokens": 8}, True),
    (kv_pages.refused, {"tokens": 16}, False),
    (kv_pages.refused, {"tokens": 8, "ranks": 2}, False),
]


@pytest.mark.parametrize(("write", "target", "fits"), PAIRS)
def test_rs_1_only_what_has_bytes_of_its_own_is_divided(
    write: Write, target: dict[str, int], fits: bool
) -> None:
    source = layouts(write, tokens=8)
    if fits:
        paired(source, layouts(write, **target))
        return
    with pytest.raises(LayoutMismatch, match=r"the caches don't fit: group \".*\", tensors: .*kv"):
        paired(source, layouts(write, **target))


def test_rs_1_backends_that_order_bytes_otherwise_are_not_paired() -> None:
    with pytest.raises(LayoutMismatch, match="the caches don't fit"):
        paired(layouts(kv_pages.by_rows, tokens=8), layouts(kv_pages.by_lanes, tokens=8))
