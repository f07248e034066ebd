"""Caches beside those of attention: indexers of sparse attention, draft models."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.adapters.test_vllm_kv_models import BLOCKS, FREE, LAYERS, Way, ends
from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance
from tests.adapters.vllm_kv_play import (
    PROMPT,
    instances,
    known,
    prefill,
    pump,
    released,
    served,
)


def pair(kind: str, ours: dict[str, Any] | None = None) -> tuple[Instance, Instance]:
    """A prefiller and a decoder with a kind of layers of the table."""
    return ends(kind, Way(ours or {}))


def reordered(instance: Instance) -> None:
    """Has vLLM register the caches last to first."""
    for rank, worker in enumerate(instance.workers):
        caches = dict(reversed(instance.caches[rank].items()))
        worker.kv_connector.register_kv_caches(caches)


@pytest.mark.parametrize("kind", ["indexers", "drafts"])
def test_rs_1_layers_are_paired_by_name_not_by_the_order_in_which_vllm_registers_them(
    kind: str,
) -> None:
    p, d = pair(kind)
    with instances(p, d):
        reordered(d)
        d.add("d", PROMPT, prefill(p))
        served(d, "d", PROMPT, p)
        released(p, d, free=FREE)


def test_pages_of_indexers_leave_while_other_layers_are_computed() -> None:
    """vLLM announces no indexer: the attention of the layer after it shows that it is written."""
    p, d = pair("indexers")
    with instances(p, d):
        d.add("d", PROMPT, known(p, d, free=FREE))
        d.step()
        time.sleep(0.3)
        seen: list[int] = []

        def after(layer: int) -> None:
            # Attention of layer 2 is computed: all before layer 1's attention have left.
            if layer == len(LAYERS["indexers"]) - 1:
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
        released(p, d, free=FREE)


@pytest.mark.parametrize("length", [2, 3, 16, 18, 37])
def test_a_decoder_computes_the_tokens_whose_drafts_depend_on_samples(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three draft modules the last one reads two tokens beyond the next (multi-token
    prediction): the prefiller's pages of these tokens are of its own samples."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 3)
    p, d = pair("drafts", {"chunk": 16})
    prompt = PROMPT[:length]
    with instances(p, d):
        d.add("d", prompt, prefill(p, "p", prompt))
        served(d, "d", prompt, p)
        assert d.computed["d"] == 2
        assert d.misread == []
        released(p, d, free=FREE)


def test_a_decoder_with_a_draft_model_that_the_prefiller_lacks_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")
    p = Instance(config("kv_producer", lease=0.5), layers=LAYERS["drafts"][:3], blocks=BLOCKS)
    d = Instance(config("kv_consumer"), layers=LAYERS["drafts"], blocks=BLOCKS)
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "draft_model.model.layers.*" in caplog.text
        released(p, d, free=FREE)
