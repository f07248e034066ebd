"""Caches beside those of attention: indexers of sparse attention, draft models, 8-bit formats."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from tests.adapters.vllm_kv_instances import LATENT, Instance, Layer, config, name_of
from tests.adapters.vllm_kv_play import (
    FREE,
    PROMPT,
    instances,
    known,
    prefill,
    pump,
    released,
    served,
)


def indexer(layer: int) -> Layer:
    name = f"model.layers.{layer}.self_attn.indexer.k_cache"
    return Layer(indexer=True, head=4, name=name)


def latent(layer: int) -> Layer:
    return Layer(head=LATENT, name=name_of(layer))


SPARSE = [each for i in range(3) for each in (indexer(i), latent(i))]
"""As DeepSeek-V3.2 has them: each layer writes its indexer's cache, then its latents."""


def draft(layer: int) -> Layer:
    return Layer(name=f"draft_model.model.layers.{layer}.self_attn.attn")


# The draft model's layers have the shape and the numbers of the first ones of the model.
DRAFTED = [Layer(), Layer(), Layer(), draft(0), draft(1)]


def pair(
    layers: list[Layer], ours: dict[str, Any] | None = None, theirs: dict[str, Any] | None = None
) -> tuple[Instance, Instance]:
    """A prefiller, and a decoder whose vLLM registers the caches in another order."""
    p = Instance(config("kv_producer", **(ours or {})), layers=layers)
    d = Instance(config("kv_consumer", **(theirs or {})), layers=layers)
    return p, d


def reordered(instance: Instance) -> None:
    """Has vLLM register the caches last to first."""
    for rank, worker in enumerate(instance.workers):
        caches = dict(reversed(instance.caches[rank].items()))
        worker.kv_connector.register_kv_caches(caches)


CASES: dict[str, tuple[list[Layer], dict[str, Any], dict[str, Any]]] = {
    "indexers": (SPARSE, {"mla": True}, {"mla": True}),
    "indexers, chunks": (SPARSE, {"mla": True, "chunk": 16}, {"mla": True}),
    "indexers, tp 2 to 4": (SPARSE, {"mla": True, "tp": 2}, {"mla": True, "tp": 4}),
    "a draft model": (DRAFTED, {}, {}),
    "a draft model, tp 2 to 1": (DRAFTED, {"tp": 2}, {"tp": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_pages_of_every_cache_are_right(name: str) -> None:
    layers, ours, theirs = CASES[name]
    p, d = pair(layers, ours, theirs)
    with instances(p, d):
        for length in (1, 7, 8, 9, 16, 37):
            prompt, number = [(17 * i + length) % 900 for i in range(length)], f"{length}"
            d.add(number, prompt, prefill(p, number, prompt, transfer_id=number))
            served(d, number, prompt, p)
            released(p, d)
        assert d.misread == []


@pytest.mark.parametrize("name", ["indexers", "a draft model"])
def test_rs_1_layers_are_paired_by_name_not_by_the_order_in_which_vllm_registers_them(
    name: str,
) -> None:
    layers, ours, theirs = CASES[name]
    p, d = pair(layers, ours, theirs)
    with instances(p, d):
        reordered(d)
        d.add("d", PROMPT, prefill(p))
        served(d, "d", PROMPT, p)
        released(p, d)


def test_pages_of_indexers_leave_while_other_layers_are_computed() -> None:
    """vLLM announces no indexer: the attention of the layer after it shows that it is written."""
    p, d = pair(SPARSE, {"mla": True}, {"mla": True})
    with instances(p, d):
        d.add("d", PROMPT, known(p, d))
        d.step()
        time.sleep(0.3)
        seen: list[int] = []

        def after(layer: int) -> None:
            # Attention of layer 2 is computed: all before layer 1's attention have left.
            if layer == len(SPARSE) - 1:
                table = d.tables("d")[d.group[0]]
                places = [len(PROMPT) - 2]
                for early in (0, 1):
                    there = lambda: not d._differs(0, early, table, PROMPT, places).any()  # noqa: B023,E731
                    pump(f"layer {early}", there, seconds=5.0)
                    seen.append(early)

        p.after = after  # type: ignore[method-assign]
        prefill(p)
        assert seen == [0, 1]
        served(d, "d", PROMPT, p)
        released(p, d)


def test_indexers_of_other_block_sizes_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Their kernels order a page's bytes in their own way, so pages are moved whole."""
    caplog.set_level(logging.INFO, "fabric_ray")
    p, d = pair(SPARSE, {"mla": True, "block": 16, "lease": 0.5}, {"mla": True})
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "indexer.k_cache" in caplog.text
        released(p, d, free=FREE)


def test_a_decoder_with_a_draft_model_that_the_prefiller_lacks_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")
    p = Instance(config("kv_producer", lease=0.5), layers=DRAFTED[:3])
    d = Instance(config("kv_consumer"), layers=DRAFTED)
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "draft_model.model.layers.*" in caplog.text
        released(p, d, free=FREE)
