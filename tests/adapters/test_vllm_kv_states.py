"""States of recurrent layers, with vLLM's scheduler and caches. That they are moved right is shown
with the other kinds of cache groups, in test_vllm_kv_hybrid.py; here is what only they need."""

from __future__ import annotations

import logging

import pytest
from vllm.config import VllmConfig

from tests.adapters.test_vllm_kv_hybrid import BLOCKS, FREE, PREFIX, STATES, pair, right
from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance
from tests.adapters.vllm_kv_play import PROMPT, instances, known, prefill, pump, released


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("lengths", [[32] * 4, [33] * 4, [34] * 4, [38, 33]])
def test_a_prompt_comes_again_whose_state_before_the_last_token_is_cached(
    lengths: list[int], retention: int | None
) -> None:
    """vLLM looks for hits in what a prefiller computes of it, and never finds all of that."""
    both = {"states": "align", "retention": retention}
    p, d = pair(STATES, {"lease": 0.5, **both}, both)
    with instances(p, d):
        for i, length in enumerate(lengths):
            prompt, name = PREFIX[:length], f"{i}"
            d.add(name, prompt, prefill(p, name, prompt, transfer_id=name))
            pump("the end", lambda name=name: name in d.ended, d, p)
            assert d.ended[name].finish_reason.name == "LENGTH"
        released(p, d, free=FREE)
        right(p, d)


def test_rs_1_a_session_that_may_go_on_sends_no_states(caplog: pytest.LogCaptureFixture) -> None:
    """Its next tokens would be computed in the block of the state."""
    caplog.set_level(logging.INFO, "fabric_ray")
    p, d = pair(STATES, {"states": "none", "lease": 0.5}, {"states": "none"})
    with instances(p, d):
        params = known(p, d, free=FREE)
        asked = {"do_remote_decode": True, "transfer_id": "t"}
        p.add("p", PROMPT, asked, 1, resumable=True)
        for _ in range(4):
            p.step()
        d.add("d", PROMPT, params)
        for _ in range(4):
            d.step()
        assert "d" not in d.computed
        p.abort("p")
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        released(p, d, free=FREE)


def test_rs_1_what_a_loaded_block_has_beyond_its_tokens_is_zeroed() -> None:
    """vLLM leaves blocks that are loaded to connectors, and other groups' bytes may be in them."""
    both = {"states": "align", "block": 16}
    p = Instance(config("kv_producer", **both), layers=STATES, blocks=BLOCKS, kernel_block=4)
    d = Instance(config("kv_consumer", **both), layers=STATES, blocks=BLOCKS, kernel_block=4)
    with instances(p, d):
        prompt = PROMPT[:18]
        d.add("d", prompt, prefill(p, "p", prompt))
        pump("the load", lambda: d.computed.get("d"), d, p)
        layer = next(i for i, each in enumerate(STATES) if not each.state)
        block = d.tables("d")[d.group[layer]][-1]
        pages = d.caches[0][d.names[layer]][4 * block : 4 * block + 4]
        assert not pages[0, :, 2:].any()
        assert not pages[1:].any()


@pytest.mark.parametrize("second", [True, False])
def test_mr_1_blocks_of_a_preempted_prefill_are_no_others_in_that_step(
    second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's second runner zeroes a step's blocks before connectors hear whose they were."""
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", second)
    p, d = pair(STATES, {"states": "align"}, {"states": "align"})
    with instances(p, d):
        assert p.scheduler.needs_kv_cache_zeroing
        d.add("d", PROMPT, known(p, d, free=FREE))
        d.step()
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"})
        for _ in range(2):  # vLLM cuts a prompt where a block of states ends
            p.scheduler.schedule()
        of = zip(p.scheduler.connector._scheduler._groups, p.tables("p"), strict=True)
        blocks = {number for group, table in of for number in table[group.needed(len(PROMPT) - 1)]}
        (request,) = p.scheduler.running
        p.scheduler.running.remove(request)
        p.scheduler._preempt_request(request, 0.0)
        used = [p.scheduler.kv_cache_manager.block_pool.blocks[n].ref_cnt > 0 for n in blocks]
        assert all(used) is second
