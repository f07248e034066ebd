"""Requests whose pages no decoder loads: their prefiller keeps none, whatever its lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance, Layer
from tests.adapters.vllm_kv_play import FREE, PROMPT, instances, prefill, pump, released, served

BLOCKS = 5
"""That a prompt has."""

DECODE = {"do_remote_decode": True, "transfer_id": "t"}


@pytest.fixture
def pair() -> Iterator[tuple[Instance, Instance]]:
    """A prefiller of two ranks, and a decoder of one that runs one request."""
    p, d = Instance(config("kv_producer", tp=2)), Instance(config("kv_consumer", seqs=1))
    with instances(p, d):
        yield p, d


def busy(d: Instance) -> None:
    """Has the decoder generate for long."""
    d.add("long", PROMPT[:9], {}, 165)
    d.step()


def test_an_abort_in_the_decoders_queue_frees_the_pages(pair: tuple[Instance, Instance]) -> None:
    p, d = pair
    busy(d)
    d.add("d", PROMPT, prefill(p))
    d.step()
    assert p.free() == FREE - BLOCKS
    d.abort("d")
    pump("the release", lambda: p.free() == FREE, p, d)
    assert "long" not in d.ended


def test_a_request_that_never_reaches_the_decoders_queue_frees_the_pages(
    pair: tuple[Instance, Instance],
) -> None:
    """As vLLM's `notify_kv_transfer_request_rejected` tells an engine core of it."""
    p, d = pair
    d.add("d", [0], prefill(p), 1, abort_immediately=True)
    d.abort("d")
    released(p, d)


def test_a_prompt_that_the_decoder_has_frees_the_pages() -> None:
    """All but its last token, which is computed: a load would take the window back."""
    layers, prompt = (Layer(), Layer(window=18)), PROMPT[:33]
    p = Instance(config("kv_producer"), layers=layers)
    d = Instance(config("kv_consumer", retention=None), layers=layers)
    with instances(p, d):
        d.add("before", prompt, {})
        served(d, "before", prompt)
        d.add("d", prompt, prefill(p, prompt=prompt))
        served(d, "d", prompt)
        assert d.computed["d"] == 1
        released(p, d)


def test_a_prefill_that_is_declined_before_it_begins_keeps_no_pages(
    pair: tuple[Instance, Instance],
) -> None:
    p, d = pair
    offer = prefill(p, "warm", PROMPT[:5], transfer_id="warm")
    d.add("w", PROMPT[:5], dict(offer))
    served(d, "w", PROMPT[:5], p)
    d.add("d", PROMPT, {**offer, "transfer_id": "t"})
    d.abort("d")
    d.step()
    senders = [worker.kv_connector._sender for worker in p.workers]  # type: ignore[attr-defined]
    pump("the message", lambda: all("t" in sender._left for sender in senders), d)
    prefill(p)
    released(p, d)


def test_an_answer_that_is_aborted_leaves_the_pages_to_the_others(
    pair: tuple[Instance, Instance],
) -> None:
    p, d = pair
    busy(d)
    params = prefill(p)
    for number in "ab":
        d.add(number, PROMPT, dict(params))
    d.abort("a")
    for _ in range(50):
        for each in (d, p):
            each.step()
        time.sleep(0.01)
    assert "long" not in d.ended
    d.abort("long")
    served(d, "b", PROMPT, p)
    assert d.computed["b"] == 1
    released(p, d)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ((Layer(), Layer(window=16)), {}),
        ((Layer(state=True), Layer()), {"states": "align"}),
    ],
    ids=["windows", "states"],
)
def test_groups_of_every_kind_are_freed(layers: tuple[Layer, ...], options: dict[str, Any]) -> None:
    p = Instance(config("kv_producer", **options), layers=layers)
    d = Instance(config("kv_consumer", **options), layers=layers)
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        d.abort("d")
        released(p, d)
        assert d.null_block_is_untouched()
