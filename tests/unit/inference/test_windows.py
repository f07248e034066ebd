"""Layers with a sliding window have pages of their own, which may go when it has passed."""

from __future__ import annotations

import torch

from fabric_ray.inference.protocols import NO_PAGE, DecodeRow, PrefillChunk
from fabric_ray.inference.tables import CachePools
from tests.unit.inference.engines import engine, followed, text


def test_layers_that_look_back_equally_far_are_a_group() -> None:
    full, window = engine("tiny-hybrid", window_pages=5).layout(0).groups
    assert (full.name, full.layers, full.window, full.pages) == ("full", (2,), None, 256)
    assert (window.name, window.layers, window.window, window.pages) == (
        "window",
        (0, 1, 3),
        24,
        5,
    )


def test_pages_before_the_window_may_be_gone() -> None:
    tokens = text(70)
    expected = followed(engine("tiny-hybrid", page_tokens=4), tokens, 60, chunk=10)
    served = engine("tiny-hybrid", page_tokens=4, window_pages=30)
    pools = CachePools(served.layout(0).groups)
    tables = pools.open(tokens, 70)
    out = []
    for start in range(0, 60, 10):
        tables.slide(start)
        chunk = PrefillChunk(tokens[start : start + 10], start, tables.tables, last=start == 50)
        tail = served.prefill(chunk)
    assert tail is not None
    out.append(tail.logits)
    for position in range(60, 70):
        tables.slide(position)
        out.append(served.decode([DecodeRow(tokens[position], position, tables.tables)])[0])
    torch.testing.assert_close(torch.stack(out), expected, atol=1e-9, rtol=0)
    gone = tables.tables[1].count(NO_PAGE)
    assert gone == (69 - 24 + 1) // 4
    assert pools.pools[1].owned_pages == 18 - gone
