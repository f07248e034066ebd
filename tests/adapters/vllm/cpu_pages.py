"""Probes the pages of vLLM's CPU attention kernels; prints what is found as JSON.

It runs under the Python of the servers: ``python cpu_pages.py``.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

HEAD = 64
CACHES = {"float32": "auto", "bfloat16": "auto", "float16": "auto", "fp8": "fp8"}


def layer(cache: torch.Tensor, dtype: torch.dtype, cache_dtype: str, scale: float) -> Any:
    """What the probe uses of an attention layer, around vLLM's own write."""
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackend,
        CPUAttentionBackendImpl,
        _get_attn_isa,
    )

    impl = SimpleNamespace(attn_type=AttentionType.DECODER, kv_cache_dtype=cache_dtype)

    def update(*args: Any) -> None:
        CPUAttentionBackendImpl.do_kv_cache_update(impl, *args)

    impl.do_kv_cache_update = update
    return SimpleNamespace(
        impl=impl,
        attn_backend=CPUAttentionBackend,
        num_kv_heads=cache.shape[1],
        head_size=HEAD,
        head_size_v=HEAD,
        kv_cache=cache,
        _k_scale_float=scale,
        _v_scale_float=scale,
        isa=_get_attn_isa(dtype, cache.shape[2], HEAD, cache_dtype),
    )


def form(kind: str, *, heads: int = 4, tokens: int = 32, scale: float = 1.0) -> dict[str, Any]:
    """What the probe says of a kind of cache, and the name that its tensors get."""
    from fabric_ray.integrations.vllm_kv_probe import page_form

    dtype = torch.bfloat16 if kind == "fp8" else getattr(torch, kind)
    stored = torch.uint8 if kind == "fp8" else dtype
    cache = torch.zeros(3, heads, tokens, 2 * HEAD, dtype=stored)
    found = page_form("layer", layer(cache, dtype, CACHES[kind], scale), cache, dtype)
    name = found.name(heads=heads, tokens=tokens, strides=cache.stride()[1:])
    return {"tokens": found.tokens, "heads": found.heads, "name": name}


def main() -> None:
    answers = {}
    for kind in CACHES:
        try:
            answers[kind] = {
                "plain": form(kind),
                "half of the heads": form(kind, heads=2),
                "larger blocks": form(kind, tokens=64),
                "other scales": form(kind, scale=0.5),
            }
        except NotImplementedError as error:  # this CPU has no kernel for it
            answers[kind] = {"missing": str(error)}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
