"""Attention layers as vLLM's KV connector sees them, with pages of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from fabric_ray.integrations.vllm_kv_probe import PageForm

Write = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Of a page [heads, tokens, content], the content [heads, content], and the token's place."""


def rows(layer: str) -> PageForm:
    """What is known of pages in which every token of every head lies by itself."""
    return PageForm(tokens=True, heads=True, content="rows")


def attention(cache: torch.Tensor, heads: int, write: Write) -> Any:
    """A layer that writes keys and values side by side, in its own order of bytes."""

    def update(
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        for token, slot in enumerate(slots.tolist()):
            page, place = divmod(slot, kv_cache.shape[2])
            write(kv_cache[page], torch.cat([key[token], value[token]], -1), place)

    width = cache.shape[3] // 2
    return SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=update),
        attn_backend=SimpleNamespace(get_name=lambda: f"BACKEND_{write.__name__.upper()}"),
        num_kv_heads=heads,
        head_size=width,
        head_size_v=width,
        kv_cache=cache,
    )


def latent(cache: torch.Tensor, rank: int) -> Any:
    """An MLA layer: rank elements of the latent, the rest of the rotary key."""

    def update(
        latents: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_cache_dtype: str,
        scale: torch.Tensor,
    ) -> None:
        flat = torch.cat([latents, rope.squeeze(1)], -1)
        for token, slot in enumerate(slots.tolist()):
            page, place = divmod(slot, kv_cache.shape[1])
            kv_cache[page, place] = flat[token].to(kv_cache.dtype)

    return SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=update),
        attn_backend=SimpleNamespace(get_name=lambda: "LATENT"),
        kv_lora_rank=rank,
        qk_rope_head_dim=cache.shape[3] - rank,
        kv_cache=cache.squeeze(1),
        kv_cache_dtype="auto",
        _k_scale=torch.ones(()),
    )


def by_rows(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    page[:, place] = content.to(page.dtype)


def by_lanes(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    """As CPU kernels do: of each head, the elements of all tokens side by side."""
    heads, tokens, width = page.shape
    lanes = page.reshape(heads, width, tokens)  # a copy: pages need not be one run
    lanes[:, :, place] = content.to(page.dtype)
    page.copy_(lanes.reshape(heads, tokens, width))


def by_scattered_heads(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    """As formats of 4 bits do: the keys of all heads, then their values."""
    heads, _, width = page.shape
    both = torch.cat([content[:, : width // 2], content[:, width // 2 :]])
    page[:, place] = both.reshape(heads, width).to(page.dtype)


def by_shifted_rows(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    """Every token has bytes of its own, in an order that depends on its place."""
    page[:, place] = content.roll(place, -1).to(page.dtype)


def by_small_pages(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    """Kernels' pages of half as many tokens, of which a page shows two as one."""
    heads, tokens, width = page.shape
    halves = page.reshape(2, heads, tokens // 2, width).clone()
    half, inside = divmod(place, tokens // 2)
    halves[half, :, inside] = content.to(page.dtype)
    page.copy_(halves.reshape(page.shape))


def nowhere(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    """Contents go to memory that isn't the page's."""


def refused(page: torch.Tensor, content: torch.Tensor, place: int) -> None:
    raise RuntimeError("no kernel")
