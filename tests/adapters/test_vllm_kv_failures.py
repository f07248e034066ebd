"""What becomes of requests whose pages don't come, with vLLM's scheduler on both sides."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance, value
from tests.adapters.vllm_kv_play import (
    FREE,
    PROMPT,
    Remote,
    instances,
    known,
    prefill,
    pump,
    released,
    served,
)
from tests.processes import within


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_rs_4_a_prefiller_that_is_killed_half_way_leaves_an_error_or_right_tokens(
    policy: str,
) -> None:
    with ExitStack() as stack:
        p = stack.enter_context(Remote(config("kv_producer", tp=2)))
        vllm = config("kv_consumer", policy=policy, tp=2)
        (d,) = stack.enter_context(instances(Instance(vllm)))
        assert p.hear(120.0) == "ready"
        p.say(("add", "warm", PROMPT[:5], {"do_remote_decode": True, "transfer_id": "w"}))
        params = None
        deadline = time.monotonic() + 20.0
        while params is None and time.monotonic() < deadline:
            params = p.ask(("params", "warm"))
        d.add("d", PROMPT, {**params, "transfer_id": "t"})
        d.step()
        table = d.table("d")
        # The prefiller knows who asks before it has the request.
        within(20, "the claim", lambda: p.ask(("asked", "t")))
        p.say(("stand after layer", 1))
        p.say(("add", "p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}))
        first = value(PROMPT[0], 0, 0, 0)
        within(20, "the first layer", lambda: bool(d._at(0, 0, 0, table, 0).eq(first).all()))
        p.kill()
        start = time.monotonic()
        pump("the end", lambda: d.computed.get("d") or "d" in d.ended, d, seconds=10.0)
        assert time.monotonic() - start < 5.0
        if policy == "fail":
            assert "d" not in d.computed
            assert d.ended["d"].finish_reason.name == "ERROR"
            # None of the pages that came is in the prefix cache.
            d.add("later", PROMPT, {})
            served(d, "later", PROMPT)
            assert d.computed["later"] == len(PROMPT)
        else:
            assert d.computed["d"] == len(PROMPT)
            served(d, "d", PROMPT)
        released(d)


def failing(params: dict[str, Any], d: Instance, *running: Instance) -> None:
    """A load that must end in an error, with nothing computed and all blocks free again."""
    d.add("d", PROMPT, params)
    pump("the end", lambda: "d" in d.ended, d, *running, seconds=10.0)
    assert d.ended["d"].finish_reason.name == "ERROR"
    assert "d" not in d.computed
    released(d)


def test_a_reused_name_never_brings_pages_of_another_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        params = prefill(p, "p", [t + 1 for t in PROMPT])
        failing(params, d, p)
        assert "another prompt" in caplog.text
        released(p)


def test_pages_that_were_handed_over_are_not_there_again(caplog: pytest.LogCaptureFixture) -> None:
    p, d, other = Instance(config("kv_producer")), *(Instance(config("kv_consumer")) for _ in "do")
    with instances(p, d, other):
        params = prefill(p)
        d.add("first", PROMPT, dict(params))
        served(d, "first", PROMPT, p)
        released(p, d)
        failing(dict(params), other, p)
        assert "handed over before" in caplog.text
        # A further answer to the prompt needs no pages of the prefiller's.
        assert d.scheduler.reset_prefix_cache()
        d.add("second", PROMPT, params)
        served(d, "second", PROMPT, p)


def test_caches_of_another_model_and_invalid_offers_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p = Instance(config("kv_producer", model="another", lease=0.5))
    d = Instance(config("kv_consumer"))
    with instances(p, d):
        params = prefill(p)
        failing(params, d, p)
        assert "another" in caplog.text
        assert "small" in caplog.text
        d.ended.clear()
        failing({"do_remote_prefill": True, "remote_offer": "invalid"}, d)
        assert "remote_offer" in caplog.text
        released(p)


def test_a_request_that_is_given_up_frees_both_sides() -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        d.add("d", PROMPT, known(p, d))
        d.step()
        time.sleep(0.2)
        d.abort("d")
        assert d.free() < FREE, "the prefiller may still write"
        released(d)
        assert "d" not in d.computed


def test_a_prefill_that_is_aborted_ends_its_decoders_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = Instance(config("kv_producer", chunk=16)), Instance(config("kv_consumer"))
    with instances(p, d):
        params = known(p, d)
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"})
        p.step()
        p.abort("p")
        failing(params, d, p)
        assert "FINISHED_ABORTED" in caplog.text


def test_pages_of_a_model_that_raised_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        d.add("d", PROMPT, known(p, d))
        d.step()
        time.sleep(0.3)

        def after(layer: int) -> None:
            if layer == 1:
                raise RuntimeError("out of memory")

        p.after = after  # type: ignore[method-assign]
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}, 1)
        try:
            p.step()
        except RuntimeError:
            # As vLLM's model runners do, whatever happened.
            p.workers[0].kv_connector.wait_for_save()
        pump("the end", lambda: "d" in d.ended, d)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "model failed" in caplog.text
        released(d)


def test_unclaimed_blocks_are_free_after_the_lease() -> None:
    p = Instance(config("kv_producer", lease=0.4))
    with instances(p):
        prefill(p)
        start = time.monotonic()
        released(p)
        assert 0.3 < time.monotonic() - start < 5.0


def test_a_preempted_prefill_waits_until_nothing_reads_its_blocks() -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        d.add("d", PROMPT, known(p, d))
        d.step()
        time.sleep(0.3)
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}, 30)
        p.step()
        assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
        p.step()
        sender = p.workers[0].kv_connector._sender
        assert all(job.is_released for job in sender._transfers["t"].taken)
        served(d, "d", PROMPT, p)
        pump("the end", lambda: "p" in p.ended, p)
        released(p, d)
