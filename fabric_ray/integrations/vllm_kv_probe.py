"""How an attention backend orders the bytes of a page, found by writing known content to one.

vLLM shows every cache as blocks x heads x tokens x content, but a backend may order the bytes of a
page as its kernels need them: on CPUs keys are packed across the tokens of a page, and formats of
4 bits keep keys and values in heads of their own. Such pages are only moved whole (RS-1).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

# Two contents that a token of a head may have.
_CONTENTS = 2


@dataclass(frozen=True)
class PageForm:
    """What is known of the bytes of a page."""

    tokens: bool
    """Whether each token has bytes of its own, the same ones at each place of a page."""
    heads: bool
    """Whether each head has bytes of its own, the same ones at each place of a page."""
    content: str
    """A mark of known content as it lies in memory, or the backend where it couldn't be written."""

    def name(self, *, heads: int, tokens: int, strides: tuple[int, ...]) -> str:
        """Names the tensors of such pages. Ends whose names agree move pages to each other: of what
        can't be divided, the name has the size and the strides of heads and tokens."""
        if self.tokens and self.heads:
            return f"kv, {self.content}"
        if self.tokens:
            return f"kv, {self.content}, {heads} heads together"
        if self.heads:
            return f"kv, {self.content}, packed by {tokens} tokens with stride {strides[1]}"
        return f"kv, {self.content}, whole pages of {heads} heads x {tokens} tokens, {strides}"


def page_form(name: str, layer: Any, tensor: torch.Tensor, dtype: torch.dtype) -> PageForm:
    """Writes to page 0 of a layer's cache, which vLLM gives to no request, and restores it.

    Args:
        name: of the layer, for the log.
        layer: vLLM's attention layer; ``None`` if it isn't known.
        tensor: its cache, [blocks, heads, tokens, content].
        dtype: of its keys and values before they are stored.
    """
    backend = getattr(layer, "attn_backend", None)
    writer = type(layer).__name__ if backend is None else backend.get_name()
    stored = ""
    if tensor.element_size() == 1:  # of several formats, all of which may be bytes for torch
        stored = f", {getattr(layer, 'kv_cache_dtype', dtype)}".replace("fp8_e4m3", "fp8")
    unknown = PageForm(tokens=False, heads=False, content=f"of {writer}{stored}")
    if layer is None:
        return unknown
    saved = tensor[0].clone()
    try:
        return _probed(tensor[0], _writer(layer, tensor, dtype))
    except Exception as error:
        _LOG.warning(
            "the cache of %s could not be probed (%s: %s); its pages are only moved to pages of "
            "the same shape",
            name,
            type(error).__name__,
            error,
        )
        return unknown
    finally:
        tensor[0].copy_(saved)


def _probed(page: torch.Tensor, write: Callable[[torch.Tensor], None]) -> PageForm:
    import torch

    heads, tokens, _ = page.shape

    def written(picked: torch.Tensor) -> torch.Tensor:
        page.zero_()
        write(picked)
        return page.clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu()

    alike = torch.zeros(tokens, heads, dtype=torch.long, device="cpu")
    plain = written(alike)
    by_token = by_head = True
    # One token of one head gets another content: what changes is its own, the same at each place.
    of_head: dict[int, torch.Tensor] = {}
    of_token: dict[int, torch.Tensor] = {}
    for token in sorted({0, 1 % tokens, tokens - 1}):
        for head in sorted({0, heads - 1}):
            picked = alike.clone()
            picked[token, head] = 1
            now = written(picked)
            changed = (now != plain).any(dim=-1)
            if not changed.any():
                raise ValueError(f"token {token} of head {head} was written elsewhere")
            by_token &= not _without(changed, 1, token).any()
            by_head &= not _without(changed, 0, head).any()
            by_token &= torch.equal(now[:, token], of_head.setdefault(head, now[:, token]))
            by_head &= torch.equal(now[head], of_token.setdefault(token, now[head]))
    if by_token and by_head:
        sample = of_token[0][0]
    else:
        first = torch.arange(tokens, dtype=torch.long, device="cpu")
        mixed = written((first % 3 % _CONTENTS).unsqueeze(1).repeat(1, heads))
        sample = mixed[0] if by_head else mixed[:, 0] if by_token else mixed
    mark = zlib.crc32(sample.contiguous().numpy().tobytes())
    return PageForm(by_token, by_head, f"sample {mark:08x}")


def _without(rows: torch.Tensor, dimension: int, index: int) -> torch.Tensor:
    rows = rows.clone()
    rows.select(dimension, index).fill_(False)
    return rows


def _writer(layer: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    """A function that writes page 0: of each token and head, one of the contents."""
    import torch

    device = tensor.device
    slots = torch.arange(tensor.shape[2], device=device, dtype=torch.long)

    def contents(width: int, seed: int) -> torch.Tensor:
        # Exact in every floating type of 8 bits of significand and more.
        numbers = torch.arange(_CONTENTS * width, device=device, dtype=torch.long)
        mixed = (numbers * (2 * seed + 37) + seed) % 251 - 125
        return (mixed / 64).to(dtype).reshape(_CONTENTS, width)

    if hasattr(layer, "kv_lora_rank"):
        latent, rope = contents(layer.kv_lora_rank, 1), contents(layer.qk_rope_head_dim, 2)

        def write_latent(picked: torch.Tensor) -> None:
            at = picked[:, 0].to(device)
            layer.impl.do_kv_cache_update(
                latent[at],
                rope[at].unsqueeze(1),
                layer.kv_cache,
                slots,
                layer.kv_cache_dtype,
                layer._k_scale,
            )

        return write_latent
    keys = contents(layer.head_size, 1)
    values = contents(getattr(layer, "head_size_v", layer.head_size), 2)

    def write(picked: torch.Tensor) -> None:
        at = picked[:, : layer.num_kv_heads].to(device)
        layer.impl.do_kv_cache_update(layer, keys[at], values[at], layer.kv_cache, slots)

    return write
