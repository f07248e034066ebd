"""The table of models and ways in which their pages travel (``kv_models.py``), with vLLM's
scheduler, specifications and caches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv import FabricRayConnector
from tests.adapters.kv_models import MOVED, REFUSED, WAYS
from tests.adapters.vllm_kv_configs import LATENT, config
from tests.adapters.vllm_kv_instances import Instance, Layer, name_of
from tests.adapters.vllm_kv_play import PROMPT, instances, prefill, pump, released, served

BLOCK, BLOCKS = 8, 96
FREE = BLOCKS - 1


def indexer(layer: int) -> Layer:
    name = f"model.layers.{layer}.self_attn.indexer.k_cache"
    return Layer(indexer=True, head=4, name=name)


def sparse(layer: int) -> tuple[Layer, Layer]:
    """A layer's indexer and its latents, in the order in which they are written."""
    return indexer(layer), Layer(head=LATENT, name=name_of(layer))


def draft(layer: int) -> Layer:
    return Layer(name=f"draft_model.model.layers.{layer}.self_attn.attn")


WINDOWED = [Layer(20), Layer(20), Layer()] * 2
LAYERS: dict[str, list[Layer]] = {
    "full": [Layer()] * 3,
    "mla": [Layer(head=LATENT)] * 3,
    "indexers": [each for i in range(3) for each in sparse(i)],
    "windows": WINDOWED,
    "windows alone": [Layer(20)] * 3,
    "states": [Layer(state=True), Layer(state=True), Layer()] * 2,
    "shared": [*WINDOWED, Layer(20, reads=4), Layer(reads=5)],
    # Of the shape and with the numbers of the model's own first layers.
    "drafts": [*[Layer()] * 3, draft(0), draft(1)],
}


@dataclass(frozen=True)
class Way:
    """How the ends differ from the same on both sides."""

    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    layout: str = "LBHNC"
    """The decoder's."""


HOW = {
    "chunks": Way({"chunk": 16}),
    "hits": Way(),
    "order": Way(layout="LBNHC"),
    "layers": Way(layout="BLHNC"),
    "blocks": Way({"block": 16}),
    "tp 1 to 2": Way({}, {"tp": 2}),
    "tp 4 to 2": Way({"tp": 4}, {"tp": 2}),
    "pp 2 to 1": Way({"pp": 2}),
    "pp 1 to 2": Way({}, {"pp": 2}),
    "pp 2 to 3": Way({"pp": 2, "tp": 2, "chunk": 16}, {"pp": 3}, layout="LBNHC"),
}


def ends(kind: str, way: Way) -> tuple[Instance, Instance]:
    """A prefiller and a decoder of such layers."""
    both: dict[str, Any] = {"mla": True} if kind in ("mla", "indexers") else {}
    if kind == "states":
        both["states"] = "align"
    layers = LAYERS[kind]
    ours = config("kv_producer", **{"lease": 3.0, **both, **way.ours})
    p = Instance(ours, layers=layers, blocks=BLOCKS)
    theirs = config("kv_consumer", **{**both, **way.theirs})
    return p, Instance(theirs, layers=layers, blocks=BLOCKS, layout=way.layout)


def test_every_row_and_way_of_the_table_has_its_caches() -> None:
    assert LAYERS.keys() == MOVED.keys()
    assert HOW.keys() == WAYS.keys()
    assert SPECS.keys() == REFUSED.keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MOVED)
def test_pages_are_moved_right_or_refused_as_the_table_says(
    kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")
    p, d = ends(kind, HOW[way])
    with instances(p, d):
        if way == "hits":
            d.add("before", PROMPT[:19], {})
            pump("the first", lambda: "before" in d.ended, d)
        if way in MOVED[kind].refused:
            d.add("refused", PROMPT, prefill(p))
            pump("the end", lambda: "refused" in d.ended, d, p)
            assert d.ended["refused"].finish_reason.name == "ERROR"
            assert "the caches don't fit" in caplog.text
            return
        for length in (1, 16, 23, 37):
            prompt, number = PROMPT[:length], f"{length}"
            d.add(number, prompt, prefill(p, number, prompt, transfer_id=number))
            served(d, number, prompt, p)
            assert d.computed[number] == 1
            released(p, d, free=FREE)
        assert d.misread == []


SIZES: dict[str, Any] = {"num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}
ONE: dict[str, Any] = {**SIZES, "num_kv_heads": 1}
FULL = FullAttentionSpec(block_size=BLOCK, **SIZES)
SPECS: dict[str, tuple[KVCacheSpec, str]] = {
    "a state for drafts": (
        MambaSpec(
            block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), num_speculative_blocks=1
        ),
        "1 states beside its own",
    ),
    "chunks": (
        ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=16, **SIZES),
        "ChunkedLocalAttentionSpec.*disable-hybrid-kv-cache-manager",
    ),
    "a latent with a window": (
        SlidingWindowMLASpec(block_size=BLOCK, sliding_window=16, **SIZES), "SlidingWindowMLASpec",
    ),
    "a compressed state": (
        MLAAttentionSpec(block_size=BLOCK, tokens_per_state=4, **ONE), "MLAAttentionSpec",
    ),
    "a window for several drafts": (
        SlidingWindowSpec(block_size=BLOCK, sliding_window=16, extra_retained_tokens=2, **SIZES),
        "2 tokens beyond its window",
    ),
    "a window of one token": (
        SlidingWindowSpec(block_size=BLOCK, sliding_window=1, **SIZES), "window of 1 tokens",
    ),
}  # fmt: skip
# That of streamed speech, of which a token has several states.
SEVERAL = FullAttentionSpec(block_size=BLOCK, tokens_per_state=Fraction(1, 4), **SIZES)


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize("kind", [*REFUSED, "several states"])
def test_caches_of_other_kinds_are_refused_by_the_name_of_a_layer(
    kind: str, role: KVConnectorRole
) -> None:
    spec, text = {**SPECS, "several states": (SEVERAL, "FullAttentionSpec")}[kind]
    named = [KVCacheGroupSpec([f"model.layers.{i}.attn"], s) for i, s in enumerate((FULL, spec))]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named)
    with pytest.raises(InvalidArgument, match=rf"`model.layers.1.attn`.*{text}"):
        FabricRayConnector(config("kv_producer"), role, caches)
