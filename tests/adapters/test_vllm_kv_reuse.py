"""Blocks that vLLM takes back while decoders ask for them: nothing is pushed from them (RS-1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_plan import digest
from tests.adapters.test_vllm_kv_computed import forgotten
from tests.adapters.test_vllm_kv_failures import failing
from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance
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

DECODE = {"do_remote_decode": True, "transfer_id": "t"}


def sender(p: Instance) -> Any:
    return p.workers[0].kv_connector._sender  # type: ignore[attr-defined]


def test_mr_1_blocks_that_no_decoder_asks_for_stay_without_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0

    def freed() -> bool:
        """Whether all blocks are, when vLLM has woken for something else."""
        nonlocal now
        now += 2.0
        return p.free() == FREE

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("fabric_ray.integrations.vllm_kv_scheduler.time", clock)
    p, d = Instance(config("kv_producer", tp=2)), Instance(config("kv_consumer"))
    with instances(p, d):
        params = prefill(p)
        p.step()
        assert p.scheduler.has_requests()  # for a second
        freed()
        p.step()
        assert not p.scheduler.has_requests()
        d.add("d", PROMPT, dict(params))
        served(d, "d", PROMPT)
        assert not freed()
        pump("the workers' report", freed, p)
        assert not p.scheduler.has_requests()


def test_rs_1_blocks_are_held_while_a_second_decoder_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    p, a, b = (Instance(config(role)) for role in ("kv_producer", "kv_consumer", "kv_consumer"))
    with instances(p, a, b):
        params = prefill(p)
        p.step()
        a.add("a", PROMPT, dict(params))
        served(a, "a", PROMPT)  # The prefiller isn't stepped: it holds the blocks still.
        asks, goes_on = threading.Event(), threading.Event()
        take = sender(p)._take

        def late(transfer: object) -> object:
            if threading.current_thread() is sender(p)._clerk:
                asks.set()
                goes_on.wait(10)
            return take(transfer)

        monkeypatch.setattr(sender(p), "_take", late)
        b.add("b", PROMPT, dict(params))
        b.step()
        assert asks.wait(5)
        for _ in range(5):
            p.step()
        if p.free() == FREE:
            forgotten(p)
        goes_on.set()
        pump("the end", lambda: b.computed.get("b") or "b" in b.ended, b, p)
        assert "b" in b.computed
        assert b.wrong("b", PROMPT) == []


@pytest.mark.parametrize("before", [0, 1], ids=["none of it", "its begin"])
def test_rs_1_what_a_device_reaches_late_finds_no_transfer_that_is_over(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        params = known(p, d)
        queued: list[Callable[[], object]] = []
        monkeypatch.setattr(sender(p), "_then", queued.append)
        p.add("p", PROMPT, dict(DECODE), 30)
        p.step()
        for call in queued[:before]:
            call()
        p.abort("p")
        released(p)
        forgotten(p)
        for call in queued[before:]:
            call()
        assert "t" not in sender(p)._transfers
        assert not sender(p)._keys
        monkeypatch.undo()
        failing(params, d, p)


def test_mr_1_a_request_that_is_preempted_between_steps_and_aborted_is_waited_for() -> None:
    p = Instance(config("kv_producer"))
    with instances(p):
        p.add("p", PROMPT, dict(DECODE), 30)
        p.step()
        assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
        p.abort("p")
        step = p.scheduler.schedule().kv_connector_metadata.step
        assert step.preempted == ["p"]
        assert [failed.held for failed in step.failed] == [False]


def test_rs_1_a_vllm_that_sleeps_without_telling_connectors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    sleeps = config("kv_producer")
    sleeps.model_config.enable_sleep_mode = True
    with pytest.raises(InvalidArgument, match="doesn't tell connectors that it sleeps"):
        Instance(sleeps)


def test_rs_4_a_request_whose_id_is_held_tells_its_decoder() -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        asked = known(p, d)
        earlier = prefill(p, "p", PROMPT, transfer_id="earlier")
        d.add("d", PROMPT[:20], {**asked, "transfer_id": "later"})
        d.step()
        prefill(p, "p", PROMPT[:20], transfer_id="later")
        pump("the failure", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        d.add("e", PROMPT, earlier)
        served(d, "e", PROMPT, p)
        released(p, d)


def test_caches_that_come_back_from_sleep_before_the_scales_are_what_they_were() -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        connector = d.workers[0].kv_connector
        connector.unregister_kv_caches()
        layers = connector._vllm_config.compilation_config.static_forward_context
        for layer in layers.values():
            # As a layer writes whose scales have been discarded.
            layer.impl.do_kv_cache_update = lambda *args: args[3].fill_(torch.nan)
        connector.restore_kv_caches()
        d.add("d", PROMPT, prefill(p))
        served(d, "d", PROMPT, p)
        released(p, d)


@pytest.mark.parametrize("offer", [["x"], {"a": 1}, 7])
def test_rs_4_an_offer_of_another_type_fails_its_request_alone(offer: object) -> None:
    d = Instance(config("kv_consumer"))
    with instances(d):
        failing({"do_remote_prefill": True, "remote_offer": offer}, d)


def test_a_late_end_of_a_job_leaves_a_later_transfer_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d = Instance(config("kv_producer", chunk=16, lease=0.5)), Instance(config("kv_consumer"))
    with instances(p, d):
        params = known(p, d)
        ends: list[tuple[Any, ...]] = []
        end = sender(p)._released
        monkeypatch.setattr(sender(p), "_released", lambda *given: ends.append(given))
        d.add("d", PROMPT, dict(params))
        d.step()
        time.sleep(0.2)
        p.add("p1", PROMPT, dict(DECODE))
        p.step()
        p.abort("p1")
        prefill(p, "p2")
        p.step()
        monkeypatch.undo()
        for given in ends:
            end(*given)
        released(p)


def test_rs_1_prompts_of_other_embeddings_have_other_digests() -> None:
    made = [torch.full((3, 4), value, dtype=torch.bfloat16) for value in (0.0, 1.0)]
    found = {digest(None, embeddings=each) for each in made}
    assert len(found | {digest(None), digest(None, embeddings=made[0].float())}) == 4
