"""Requests that wait in a decoder's queue for longer than the prefiller's lease, with vLLM's
scheduler on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance
from tests.adapters.vllm_kv_play import FREE, PROMPT, instances, prefill, pump, released, served

LEASE = 0.8
BLOCKS = 5
"""That a prompt has."""


@pytest.fixture
def pair() -> Iterator[tuple[Instance, Instance]]:
    """A prefiller, and a decoder whose only place is taken."""
    p = Instance(config("kv_producer", lease=LEASE))
    d = Instance(config("kv_consumer", seqs=1, policy="recompute"))
    with ExitStack() as stack:
        stack.enter_context(instances(p, d))
        d.add("long", PROMPT[:9], {}, 165)
        d.step()
        yield p, d


def for_a_while(leases: float, *running: Instance) -> None:
    """Steps of some milliseconds, as models take them."""
    until = time.monotonic() + leases * LEASE
    while time.monotonic() < until:
        for each in running:
            if each.scheduler.has_requests():
                each.step()
        time.sleep(0.03)


def test_pages_stay_while_their_request_waits_in_the_queue(pair: tuple[Instance, Instance]) -> None:
    p, d = pair
    params = prefill(p)
    d.add("d", PROMPT, params)
    for_a_while(3.0, p, d)
    assert "long" not in d.ended
    assert p.free() == FREE - BLOCKS
    served(d, "d", PROMPT, p)
    assert d.computed["d"] == 1
    released(p)


@pytest.mark.parametrize("end", ["abort", "kill"])
def test_pages_are_free_within_a_lease_when_nothing_waits_for_them(
    pair: tuple[Instance, Instance], end: str
) -> None:
    """The client of a request has left, or the decoder's engine core was killed."""
    p, d = pair
    d.add("d", PROMPT, prefill(p))
    for_a_while(2.0, p, d)
    assert p.free() == FREE - BLOCKS
    if end == "abort":
        d.abort("d")
    start = time.monotonic()
    pump("the release", lambda: p.free() == FREE, p, *[d] * (end == "abort"), seconds=10.0)
    # It is noticed by steps, which an idle prefiller makes once in a second.
    assert time.monotonic() - start < LEASE + 2.0


def other(number: int) -> list[int]:
    return [token + number + 1 for token in PROMPT]


def test_leases_end_where_a_prompt_lacks_blocks(pair: tuple[Instance, Instance]) -> None:
    """A decoder may wait for that prompt, and its other requests for the decoder."""
    p, d = pair
    held: list[Any] = [
        prefill(p, f"p{i}", other(i), transfer_id=f"t{i}") for i in range(FREE // BLOCKS)
    ]
    for i, params in enumerate(held):
        d.add(f"d{i}", other(i), params)
    for_a_while(2.0, p, d)
    assert p.free() == FREE % BLOCKS
    p.add("late", other(99), {"do_remote_decode": True, "transfer_id": "late"}, 1)
    for_a_while(0.7, p, d)
    assert "late" not in p.ended, "a lease has not passed"
    end = time.monotonic() + 4 * LEASE + 5.0
    while "late" not in p.ended:
        assert time.monotonic() < end
        for_a_while(0.1, p, d)
    assert "long" not in d.ended, "requests are in the queue"
    pump("the first request", lambda: "d0" in d.ended, p, d)
    assert d.computed["d0"] == len(PROMPT)
