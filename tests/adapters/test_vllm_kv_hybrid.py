"""Models with several cache groups: vLLM's hybrid manager gives layers with windows blocks of their
own, and takes those back that no token sees any more."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations import vllm_kv
from fabric_ray.integrations.vllm_kv import FabricRayConnector
from tests.adapters.test_vllm_kv_computed import checked, send
from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance, Layer
from tests.adapters.vllm_kv_play import (
    DRAWN,
    PROMPT,
    SCHEDULES,
    instances,
    known,
    prefill,
    pump,
    released,
    served,
)

BLOCK, BLOCKS = 8, 128
FREE = BLOCKS - 1
PREFIX = [(31 * i + 5) % 900 for i in range(6 * BLOCK)]


def pattern(window: int, *, local: int = 3, times: int = 2) -> list[Layer]:
    """Layers as Gemma 3 has them: several with a window, then one without, again and again."""
    return [*(Layer(window) for _ in range(local)), Layer()] * times


def pair(
    layers: list[Layer], ours: dict[str, Any] | None = None, theirs: dict[str, Any] | None = None
) -> tuple[Instance, Instance]:
    """A prefiller and a decoder."""
    p = Instance(config("kv_producer", **(ours or {})), layers=layers, blocks=BLOCKS)
    d = Instance(config("kv_consumer", **(theirs or {})), layers=layers, blocks=BLOCKS)
    return p, d


def overwrite(p: Instance, *, cached: bool = True) -> None:
    """Writes to all blocks that vLLM may give to other requests."""
    pool = p.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        if block.ref_cnt or block.is_null or (block.block_hash is not None and not cached):
            continue
        for caches in p.caches:
            for name, cache in caches.items():
                ratio = p.pages_of_block(name)
                cache[block.block_id * ratio : (block.block_id + 1) * ratio] = -3


def right(*each: Instance) -> None:
    """No step has read what wasn't there."""
    for one in each:
        assert one.misread == []
        assert one.null_block_is_untouched()


STATES = [Layer(state=True), Layer(state=True), Layer()] * 2
SAME = pattern(20)
PAIRS: dict[str, tuple[list[Layer], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "same": (SAME, {}, {}, {}),
    "a window of whole blocks": (pattern(16), {}, {}, {}),
    "a window that ends a block with the token before it": (pattern(17), {}, {}, {}),
    "a window of less than a block": (pattern(3), {}, {}, {}),
    "two windows": ([*pattern(20), *pattern(9)], {}, {}, {}),
    "windows alone": ([Layer(20)] * 3, {}, {}, {}),
    "chunks": (SAME, {"chunk": 16}, {}, {}),
    "tp 1 to 2, other layouts": (SAME, {}, {"tp": 2}, {"layout": "LBNHC"}),
    "tp 4 to 2, layers in blocks": (SAME, {"tp": 4}, {"tp": 2}, {"layout": "BLHNC"}),
    "larger blocks to smaller": (SAME, {"block": 16}, {}, {}),
    "kernels' blocks": (SAME, {"block": 16}, {"block": 16}, {"kernel_block": 4}),
    "pages of other sizes": (
        [dataclasses.replace(each, head=8 if each.window else 16) for each in SAME], {}, {}, {},
    ),
    "layers that use another's cache": (
        [*SAME, Layer(20, reads=6), Layer(reads=7)], {}, {}, {},
    ),
    "states": (STATES, {"states": "align"}, {"states": "align"}, {}),
    "states, chunks": (STATES, {"states": "align", "chunk": 16}, {"states": "align"}, {}),
    "a state for each request": (STATES, {"states": "none"}, {"states": "none"}, {}),
    "states of other modes": (STATES, {"states": "none"}, {"states": "align", "block": 16}, {}),
    "states alone": ([Layer(state=True)] * 3, {"states": "align"}, {"states": "align"}, {}),
    "states, kernels' blocks": (
        STATES, {"states": "align", "block": 16}, {"states": "align", "block": 16},
        {"kernel_block": 4},
    ),
    "states, tp 2": (STATES, {"states": "align", "tp": 2}, {"states": "align", "tp": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_decoder_has_all_that_its_tokens_see(name: str) -> None:
    layers, ours, theirs, memory = PAIRS[name]
    p = Instance(config("kv_producer", **ours), layers=layers, blocks=BLOCKS)
    d = Instance(config("kv_consumer", **theirs), layers=layers, blocks=BLOCKS, **memory)
    with instances(p, d):
        assert len(set(p.group)) > 1 or "alone" in name
        for length in (1, 2, *range(7, 27), 33, 36, 37, 63, 64, 65):
            prompt, number = [(17 * i + length) % 900 for i in range(length)], f"{length}"
            params = prefill(p, number, prompt, transfer_id=number)
            # What vLLM has taken back is another's now.
            overwrite(p)
            d.add(number, prompt, params)
            served(d, number, prompt, p)
            assert d.computed[number] == 1
            released(p, d, free=FREE)
        right(p, d)


@pytest.mark.parametrize("window", [17, 32, 33])
@pytest.mark.parametrize("ours", [{"block": 16}, {"block": 32}], ids=str)
def test_rs_1_the_block_that_a_window_begins_in_comes_whole(
    window: int, ours: dict[str, Any]
) -> None:
    """The decoder's prefix cache gives it to a later request as a whole."""
    layers = pattern(window)
    p = Instance(config("kv_producer", **ours), layers=layers, blocks=BLOCKS, kernel_block=8)
    theirs = config("kv_consumer", block=16, retention=None)
    d = Instance(theirs, layers=layers, blocks=BLOCKS, kernel_block=8)
    with instances(p, d):
        for number, length in enumerate((41, 48, 57, 64, 65)):
            prompt = [(17 * i + length) % 900 for i in range(length)]
            name = f"{number}"
            d.add(name, prompt, prefill(p, name, prompt, transfer_id=name))
            served(d, name, prompt, p)
            shared = prompt[: length // 16 * 16]
            d.add(f"later {name}", [*shared, 7], {})
            pump("the later one", lambda name=name: f"later {name}" in d.ended, d)
            assert d.computed[f"later {name}"] == 1, "the rest is cached"
            released(p, d, free=FREE)
        right(p, d)


def test_rs_1_blocks_of_which_the_prefiller_gives_parts_back_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = pair(SAME, {"block": 8}, {"block": 16})
    with instances(p, d), caplog.at_level(logging.WARNING):
        d.add("d", PROMPT, prefill(p, "p", PROMPT))
        pump("the refusal", lambda: "d" in d.ended, d, p)
    assert "block_tokens: 8" in caplog.text


def test_vllms_hybrid_manager_stays_on() -> None:
    assert KVConnectorFactory.supports_hma_config(config("kv_producer").kv_transfer_config)


def test_groups_of_other_block_sizes_are_vllms() -> None:
    """Pages of all groups are of one size, so smaller heads make longer blocks."""
    layers = PAIRS["pages of other sizes"][0]
    p, d = pair(layers)
    with instances(p, d):
        assert {p.blocks[i]: layers[i].window for i in range(len(layers))} == {16: 20, 8: None}


def test_pages_leave_while_other_layers_are_computed() -> None:
    p, d = pair(SAME)
    with instances(p, d):
        d.add("d", PROMPT, known(p, d, free=FREE))
        d.step()
        time.sleep(0.3)
        seen: list[int] = []

        def after(layer: int) -> None:
            if layer:
                table = d.tables("d")[d.group[layer - 1]]
                places = [len(PROMPT) - 2]
                there = lambda: not d._differs(0, layer - 1, table, PROMPT, places).any()  # noqa: E731
                pump(f"layer {layer - 1}", there, seconds=5.0)
                seen.append(layer - 1)

        p.after = after  # type: ignore[method-assign]
        prefill(p)
        assert seen == list(range(len(SAME) - 1))
        served(d, "d", PROMPT, p)
        right(p, d)


@pytest.mark.parametrize("window", [16, 17, 20])
@pytest.mark.parametrize("early", [False, True], ids=["asked late", "asked early"])
def test_mr_1_a_window_stays_while_the_prefill_goes_on(window: int, early: bool) -> None:
    """vLLM takes blocks back that the next token doesn't see; a decoder needs them still."""
    p, d = pair(pattern(window))
    with instances(p, d):
        params = known(p, d, free=FREE)
        asked = {"do_remote_decode": True, "transfer_id": "t"}
        if early:
            d.add("d", PROMPT, dict(params))
            d.step()
            time.sleep(0.1)
        p.add("p", PROMPT, asked, 60)
        while "p" not in p.ended:
            p.step()
            overwrite(p)
        if not early:
            d.add("d", PROMPT, dict(params))
        served(d, "d", PROMPT, p)
        released(p, d, free=FREE)
        right(p, d)


def test_what_a_decoder_has_in_its_prefix_cache_is_not_sent() -> None:
    p, d = pair(SAME)
    with instances(p, d):
        d.add("before", PROMPT[:33], {})
        pump("the first", lambda: "before" in d.ended, d)
        params = prefill(p)
        d.add("d", PROMPT, params)
        d.step()
        # Of the first 32 tokens those that later ones see, none of which the prefiller writes.
        full, windowed = (d.tables("d")[d.group[layer]] for layer in (3, 0))
        for layer, kept in ((3, full[:4]), (0, [b for b in windowed[:4] if b])):
            assert kept
            d.caches[0][f"model.layers.{layer}.self_attn.attn"][kept] = -1.0
        pump("the load", lambda: d.computed.get("d"), d, p)
        assert {place for _, layer, _, place in d.wrong("d", PROMPT) if layer == 3} == set(
            range(32)
        )
        late = {place for _, layer, _, place in d.wrong("d", PROMPT) if layer == 0}
        assert late == set(range(len(PROMPT) - 20, 32))
        released(p, d, free=FREE)


@pytest.mark.parametrize("window", [9, 20])
@pytest.mark.parametrize("order", ["abc", "cba"])
def test_rs_1_a_prefix_that_another_request_computes_in_the_same_step(
    order: str, window: int
) -> None:
    """Of layers with windows the hits begin later than of those without."""
    prompts = {name: [*PREFIX, ord(name), *range(i)] for i, name in enumerate("abc")}
    p, d = pair(pattern(window), {"chunk": 256, "retention": None}, {"retention": None})
    with instances(p, d):
        params = known(p, d, free=FREE)
        p.scheduler.reset_prefix_cache()
        overwrite(p)
        for name in order:
            d.add(name, prompts[name], {**params, "transfer_id": name})
        d.step()
        time.sleep(0.2)
        for name in order:
            send(p, name, prompts[name])
        p.step()
        for name in order:
            shared = 0 if name == order[0] else len(PREFIX)
            assert p.computed[name] == len(prompts[name]) - shared, "one step for all of them"
        checked(d, prompts, p)
        d.add("later", [*PREFIX, 1, 2, 3], {})
        checked(d, {"later": [*PREFIX, 1, 2, 3]})
        assert d.computed["later"] == 3
        released(p, d, free=FREE)
        right(p, d)


@pytest.mark.parametrize("window", [10, 16])
def test_a_prompt_of_which_all_but_the_last_token_are_cached(window: int) -> None:
    """The decoder gets one token, or computes it where a window would lack another for it."""
    p, d = pair(pattern(window), {"lease": 0.5})
    prompt = [*PREFIX[: 4 * BLOCK], 7]
    with instances(p, d):
        d.add("before", prompt, {})
        pump("the first", lambda: "before" in d.ended, d)
        d.add("d", prompt, prefill(p, "p", prompt))
        served(d, "d", prompt, p)
        released(p, d, free=FREE)
        right(p, d)


def test_pages_of_a_window_that_are_gone_after_a_preemption_are_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request that is resumed with hits beyond its prompt lacks blocks of the prompt's window."""
    caplog.set_level(logging.INFO, "fabric_ray")
    p, d = pair([Layer(9)] * 2, {"retention": None})
    with instances(p, d):
        params = known(p, d, free=FREE)
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}, 40)
        for _ in range(25):
            p.step()
        (request,) = p.scheduler.running
        p.scheduler.running.remove(request)
        p.scheduler._preempt_request(request, 0.0)
        while "p" not in p.ended:
            p.step()
        d.add("d", PROMPT, params)
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "taken back when the prefill was preempted" in caplog.text
        released(p, d, free=FREE)


@pytest.mark.parametrize("states", [None, "align"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_rs_4_a_load_that_fails_ends_its_request_or_is_computed(
    policy: str, states: str | None
) -> None:
    layers, both = (STATES, {"states": states}) if states else (SAME, {})
    p, d = pair(layers, {"chunk": 16, **both}, {"policy": policy, **both})
    with instances(p, d):
        params = known(p, d, free=FREE)
        d.add("before", PROMPT[:17], {})
        pump("the first", lambda: "before" in d.ended, d)
        d.add("d", PROMPT, params)
        d.step()
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"})
        p.step()
        p.abort("p")
        pump("the end", lambda: "d" in d.ended, d, p)
        if policy == "fail":
            assert d.ended["d"].finish_reason.name == "ERROR"
            assert "d" not in d.computed
        else:
            assert d.ended["d"].finish_reason.name == "LENGTH"
            assert d.computed["d"] == len(PROMPT) - 16
        d.add("later", PROMPT, {})
        pump("the later one", lambda: "later" in d.ended, d)
        assert d.ended["later"].finish_reason.name == "LENGTH"
        released(p, d, free=FREE)
        right(p, d)


@pytest.mark.parametrize("ours", [False, True])
def test_ends_of_which_one_has_the_hybrid_manager_off_are_refused(
    ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")
    p, d = pair(SAME, {"hybrid": ours, "lease": 0.5}, {"hybrid": not ours})
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        pump("the end", lambda: "d" in d.ended, d, p)
        assert d.ended["d"].finish_reason.name == "ERROR"
        assert "the caches don't fit" in caplog.text
        assert "sliding window of 20" in caplog.text
        released(p, d, free=FREE)


def test_windows_without_the_hybrid_manager_are_moved_whole() -> None:
    p, d = pair(SAME, {"hybrid": False}, {"hybrid": False})
    with instances(p, d):
        assert set(p.group) == {0}
        d.add("d", PROMPT, prefill(p))
        served(d, "d", PROMPT, p)
        released(p, d, free=FREE)
        right(p, d)


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    named = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named)


SIZES: dict[str, Any] = {"num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=BLOCK, **SIZES)


def test_a_cache_in_host_memory_is_refused() -> None:
    vllm = config("kv_producer")
    kv = groups(FULL, FULL)
    kv.kv_cache_groups[1].host_resident = True
    with pytest.raises(InvalidArgument, match=r"`model.layers.1.attn` lies in host memory"):
        FabricRayConnector(vllm, KVConnectorRole.WORKER, kv)


def test_a_model_without_caches_is_refused() -> None:
    vllm = config("kv_producer")
    with pytest.raises(InvalidArgument, match="no caches"):
        FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups())


def test_a_vllm_that_does_not_follow_groups_is_told_to_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_kv, "_takes_groups", False)
    vllm = config("kv_consumer")
    FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups(FULL))
    windowed = SlidingWindowSpec(block_size=BLOCK, sliding_window=16, **SIZES)
    for several in ((FULL, windowed), (windowed,)):
        with pytest.raises(InvalidArgument, match="--disable-hybrid-kv-cache-manager"):
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups(*several))


@SCHEDULES
@given(
    drawn=DRAWN,
    kind=st.sampled_from([5, 9, 16, 17, 30, "align", "none"]),
    local=st.integers(1, 3),
    chunk=st.sampled_from([16, 40, 256]),
    blocks=st.sampled_from([56, 72, 160]),
    steps=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    retention=st.sampled_from([None, 0, 2 * BLOCK]),
    early=st.booleans(),
)
def test_rs_1_mr_1_any_schedule_brings_right_pages(
    drawn: list[tuple[int, int, int]],
    kind: int | str,
    local: int,
    chunk: int,
    blocks: int,
    steps: list[int],
    retention: int | None,
    early: bool,
) -> None:
    """Chunks, hits in the same and in later steps, windows that go on, states, preemption and
    resumption: vLLM's scheduler decides. Every page that a decoder reads was computed, and is the
    right one; what vLLM has taken back is overwritten at once."""
    prompts = {
        f"r{i}": PREFIX[: BLOCK * shared] + [(i * 97 + j) % 900 for j in range(rest)]
        for i, (shared, rest, _) in enumerate(drawn)
    }
    # Without a prefix cache nothing is retained in one.
    both: dict[str, Any] = {"retention": None if kind == "none" else retention}
    if isinstance(kind, int):
        layers = pattern(kind, local=local, times=1)
    else:
        layers, both["states"] = [*[Layer(state=True)] * local, Layer()], kind
    ours = config("kv_producer", chunk=chunk, **both)
    theirs = config("kv_consumer", policy="recompute", **both)
    p = Instance(ours, layers=layers, blocks=blocks)
    d = Instance(theirs, layers=layers, blocks=160)
    with instances(p, d):
        params = prefill(p, "warm", [1, 2, 3], transfer_id="warm")

        def step() -> None:
            p.step()
            overwrite(p, cached=False)

        if early:
            for name, prompt in prompts.items():
                d.add(name, prompt, {**params, "transfer_id": name})
            d.step()
            time.sleep(0.05)
        for (name, prompt), (*_, tokens), waits in zip(prompts.items(), drawn, steps, strict=False):
            p.add(name, prompt, {"do_remote_decode": True, "transfer_id": name}, tokens)
            for _ in range(waits):
                step()
        late = set() if early else set(prompts)

        def over() -> bool:
            if p.scheduler.has_requests():
                step()
            for name in p.ended.keys() & late:
                # Held pages leave no room for others until a decoder has them.
                d.add(name, prompts[name], p.ended[name].kv_transfer_params or {})
                late.remove(name)
            return prompts.keys() <= d.ended.keys() & p.ended.keys()

        pump("the ends", over, d)
        # The decoder's own requests find these pages in its prefix cache.
        for name, prompt in prompts.items():
            d.add(f"{name} again", [*prompt, 3, 5], {})
        pump("more", lambda: len(d.ended) >= 2 * len(prompts), d)
        assert all(each.finish_reason.name == "LENGTH" for each in d.ended.values())
        right(p, d)
