"""RS-1: no page leaves a prefiller before its tokens are computed, whatever vLLM has scheduled."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.vllm_kv_configs import LAYERS, config
from tests.adapters.vllm_kv_instances import Instance
from tests.adapters.vllm_kv_play import DRAWN, SCHEDULES, instances, known, prefill, pump, released

BLOCK = 8
BLOCKS = 64
PREFIX = [(31 * i + 5) % 900 for i in range(4 * BLOCK)]


def forgotten(p: Instance) -> None:
    """Memory of pages that aren't computed yet holds what no token writes."""
    p.scheduler.reset_prefix_cache()
    for cache in p.caches:
        for layer in cache.values():
            layer.fill_(-3.0)


def send(p: Instance, name: str, prompt: list[int], tokens: int = 1) -> None:
    p.add(name, prompt, {"do_remote_decode": True, "transfer_id": name}, tokens)


def checked(d: Instance, prompts: dict[str, list[int]], *others: Instance) -> None:
    """Every request has the right pages when it is computed, and ends."""
    right: set[str] = set()
    while len(right) < len(prompts):
        pump("a load", lambda: d.computed.keys() & prompts.keys() - right, d, *others)
        for name in d.computed.keys() & prompts.keys() - right:
            assert d.wrong(name, prompts[name]) == [], name
            right.add(name)
    pump("the ends", lambda: prompts.keys() <= d.ended.keys(), d, *others)


@pytest.mark.parametrize("order", ["abcd", "dcba"])
def test_rs_1_a_prefix_that_another_request_computes_in_the_same_step(order: str) -> None:
    prompts = {name: [*PREFIX, ord(name), *range(i)] for i, name in enumerate("abcd")}
    p = Instance(config("kv_producer", chunk=256), blocks=BLOCKS)
    d = Instance(config("kv_consumer"), blocks=BLOCKS)
    with instances(p, d):
        params = known(p, d, free=BLOCKS - 1)
        forgotten(p)
        for name in order:
            d.add(name, prompts[name], {**params, "transfer_id": name})
        d.step()
        time.sleep(0.2)
        for name in order:
            send(p, name, prompts[name])
        p.step()
        first = order[0]
        for name in order:
            shared = 0 if name == first else len(PREFIX)
            assert p.computed[name] == len(prompts[name]) - shared, "one step for all of them"
        checked(d, prompts, p)
        # The decoder's own requests find these pages in its prefix cache.
        d.add("later", [*PREFIX, 1, 2, 3], {})
        checked(d, {"later": [*PREFIX, 1, 2, 3]})
        assert d.computed["later"] == 3
        released(p, d, free=BLOCKS - 1)


def test_rs_1_pages_of_microbatches_leave_after_the_pass() -> None:
    p = Instance(config("kv_producer"), blocks=BLOCKS)
    d = Instance(config("kv_consumer"), blocks=BLOCKS)
    with instances(p, d):
        params = known(p, d, free=BLOCKS - 1)
        forgotten(p)
        for worker in p.workers:
            worker.kv_connector._vllm_config.parallel_config.enable_dbo = True
        d.add("a", PREFIX, {**params, "transfer_id": "a"})
        d.step()
        time.sleep(0.2)
        early = p._at

        def halves(layer: int) -> None:
            """The second half of a step's tokens is written after the hooks of the first."""
            if layer == 0:
                table = p.table("a")
                for at in range(LAYERS):
                    for worker in p.workers:
                        name = f"model.layers.{at}.self_attn.attn"
                        worker.kv_connector.save_kv_layer(name, p.caches[0][name], None)
                time.sleep(0.2)
                assert early(0, 1, 0, table, 0).eq(-3.0).all()

        p.after = halves  # type: ignore[method-assign]
        send(p, "a", PREFIX)
        pump("the prefill", lambda: "a" in p.ended, p)
        checked(d, {"a": PREFIX}, p)


def test_rs_1_pages_beside_loads_of_another_connector_leave_when_the_request_is_over() -> None:
    """vLLM is told after the step that a load has failed, and computes those tokens again."""
    p = Instance(config("kv_producer"), blocks=BLOCKS)
    d = Instance(config("kv_consumer"), blocks=BLOCKS)
    with instances(p, d):
        params = known(p, d, free=BLOCKS - 1)
        forgotten(p)
        build = p.scheduler.connector.build_connector_meta

        def with_loads(output: Any) -> Any:
            output.has_sync_kv_loads = True
            return build(output)

        p.scheduler.connector.build_connector_meta = with_loads  # type: ignore[method-assign]
        d.add("a", PREFIX, {**params, "transfer_id": "a"})
        d.step()
        time.sleep(0.2)
        send(p, "a", PREFIX, tokens=4)
        while "a" not in p.ended:
            p.step()
            time.sleep(0.2)
            d.step()
            assert "a" in p.ended or "a" not in d.computed
        checked(d, {"a": PREFIX}, p)
        released(p, d, free=BLOCKS - 1)


@SCHEDULES
@given(
    drawn=DRAWN,
    chunk=st.sampled_from([16, 40, 256]),
    blocks=st.sampled_from([24, 64]),
    steps=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    early=st.booleans(),
)
def test_rs_1_any_schedule_brings_right_pages(
    drawn: list[tuple[int, int, int]], chunk: int, blocks: int, steps: list[int], early: bool
) -> None:
    """Chunks, hits in the same and in later steps, preemption and resumption: vLLM's scheduler
    decides, and every page that a decoder gets is right."""
    prompts = {
        f"r{i}": [*PREFIX, *PREFIX][: BLOCK * shared] + [(i * 97 + j) % 900 for j in range(rest)]
        for i, (shared, rest, _) in enumerate(drawn)
    }
    p = Instance(config("kv_producer", chunk=chunk), blocks=blocks)
    d = Instance(config("kv_consumer", policy="recompute"), blocks=BLOCKS)
    with instances(p, d):
        params = prefill(p, "warm", [1, 2, 3], transfer_id="warm")
        forgotten(p)
        if early:
            for name, prompt in prompts.items():
                d.add(name, prompt, {**params, "transfer_id": name})
            d.step()
            time.sleep(0.05)
        for (name, prompt), (*_, tokens), waits in zip(prompts.items(), drawn, steps, strict=False):
            send(p, name, prompt, tokens)
            for _ in range(waits):
                p.step()
        late = set() if early else set(prompts)
        right: set[str] = set()
        while len(right) < len(prompts):
            pump("a load", lambda: d.computed.keys() - right or p.ended.keys() & late, p, d)
            for name in d.computed.keys() - right:
                assert d.wrong(name, prompts[name]) == [], name
                right.add(name)
            for name in p.ended.keys() & late:
                # Held pages leave no room for others until a decoder has them.
                d.add(name, prompts[name], p.ended[name].kv_transfer_params or {})
                late.remove(name)
        pump("the ends", lambda: prompts.keys() <= d.ended.keys() & p.ended.keys(), d, p)
