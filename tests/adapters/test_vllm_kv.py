"""vLLM's published scheduler, factory and connector driver run the KV connector, on both sides."""

from __future__ import annotations

import inspect
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv import FabricRayConnector
from tests.adapters.vllm_kv_instances import LAYERS, Instance, Remote, config, value

PROMPT = [(17 * i) % 900 for i in range(37)]
BLOCKS = 24
FREE = BLOCKS - 1  # vLLM keeps one for itself.


@contextmanager
def instances(*made: Instance) -> Iterator[tuple[Instance, ...]]:
    try:
        yield made
    finally:
        for each in made:
            each.close()


def pump(what: str, done: Callable[[], object], *running: Instance, seconds: float = 20.0) -> None:
    """Steps instances, as their engine cores do, until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        for each in running:
            if each.scheduler.has_requests():
                each.step()
        time.sleep(0.002)


def prefill(p: Instance, number: str = "p", prompt: list[int] = PROMPT, **params: Any) -> Any:
    """A prefill that is over; what its response says for the decoder."""
    p.add(number, prompt, {"do_remote_decode": True, "transfer_id": "t", **params}, 1)
    pump("the prefill", lambda: number in p.ended, p)
    return p.ended[number].kv_transfer_params


def served(d: Instance, number: str, prompt: list[int], *running: Instance) -> None:
    """Steps until a request has been computed; then its pages are right, and are let go."""
    pump("the load", lambda: d.computed.get(number), d, *running)
    assert d.wrong(number, prompt) == []
    pump("the end", lambda: number in d.ended, d, *running)
    assert d.ended[number].finish_reason.name == "LENGTH"


def known(p: Instance, d: Instance) -> dict[str, Any]:
    """What makes a decoder ask for the transfer `t`, before the prefiller has such a request."""
    params = prefill(p, "warm", PROMPT[:5], transfer_id="warm")
    d.add("warm", PROMPT[:5], dict(params))
    served(d, "warm", PROMPT[:5], p)
    released(p, d)
    return {**params, "transfer_id": "t"}


def released(*each: Instance) -> None:
    pump("the release", lambda: all(one.free() == FREE for one in each), *each)


def test_the_connector_has_the_shape_of_the_published_class() -> None:
    assert issubclass(FabricRayConnector, KVConnectorBase_V1)
    assert not inspect.isabstract(FabricRayConnector)
    ours = {n for n, f in vars(FabricRayConnector).items() if not n.startswith("_") and callable(f)}
    ours |= KVConnectorBase_V1.__abstractmethods__
    for name in ours:
        shapes = [
            list(inspect.signature(getattr(c, name)).parameters)
            for c in (FabricRayConnector, KVConnectorBase_V1)
        ]
        assert shapes[0] == shapes[1], name
    vllm = config("kv_producer")
    found = KVConnectorFactory.get_connector_class(vllm.kv_transfer_config)
    assert found is FabricRayConnector


PAIRS = {
    "same": ({}, {}, {}, {}),
    "tp 1 to 2, other layouts": ({}, {}, {"tp": 2}, {"layout": "LBNHC"}),
    "tp 4 to 2, layers in blocks": ({"tp": 4}, {"layout": "BLHNC"}, {"tp": 2}, {"layout": "BHLNC"}),
    "tp 2 to 8, more ranks than heads": ({"tp": 2}, {}, {"tp": 8}, {}),
    "tp 8 to 1": ({"tp": 8}, {"layout": "LHBNC"}, {}, {}),
    "other blocks": ({"block": 16}, {}, {"block": 8, "tp": 2}, {}),
    "kernels' blocks": ({"block": 16}, {"kernel_block": 4}, {"block": 8}, {"kernel_block": 8}),
    "chunks": ({"chunk": 16}, {}, {}, {}),
    "latent": ({"mla": True, "tp": 2}, {}, {"mla": True, "tp": 4}, {}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_decoder_has_every_byte_and_computes_one_token(pair: str) -> None:
    ours, our_memory, theirs, their_memory = PAIRS[pair]
    p = Instance(config("kv_producer", **ours), **our_memory)
    d = Instance(config("kv_consumer", **theirs), **their_memory)
    with instances(p, d):
        params = prefill(p)
        assert p.free() < FREE, "blocks stay for the decoder"
        d.add("d", PROMPT, params)
        served(d, "d", PROMPT, p)
        assert d.computed["d"] == 1
        released(p, d)


def test_layers_leave_while_others_are_computed() -> None:
    p, d = Instance(config("kv_producer", tp=2)), Instance(config("kv_consumer"))
    with instances(p, d):
        d.add("d", PROMPT, known(p, d))
        d.step()
        time.sleep(0.3)  # The prefiller knows who asks before it has the request.
        seen: list[int] = []

        def after(layer: int) -> None:
            def right() -> bool:
                table = d.table("d")
                last = len(PROMPT) - 1
                wanted = value(PROMPT[last], last, layer - 1, 3)
                at = d._at(0, layer - 1, 3, table, last)
                return bool(at.eq(wanted).all())

            if layer:
                pump(f"layer {layer - 1}", right, seconds=5.0)
                seen.append(layer - 1)

        p.after = after  # type: ignore[method-assign]
        p.add("p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}, 1)
        pump("the prefill", lambda: "p" in p.ended, p)
        assert seen == list(range(LAYERS - 1))
        served(d, "d", PROMPT, p)


def test_what_a_decoder_has_in_its_prefix_cache_is_not_sent() -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        d.add("before", PROMPT[:16], {})
        pump("the first", lambda: "before" in d.ended, d)
        params = prefill(p)
        d.add("d", PROMPT, params)
        d.step()
        kept = d.table("d")[:2]
        for cache in d.caches[0].values():
            cache[kept] = -1.0
        pump("the load", lambda: d.computed.get("d"), d, p)
        assert all((cache[kept] == -1.0).all() for cache in d.caches[0].values())
        assert {place for *_, place in d.wrong("d", PROMPT)} == set(range(16))
        released(p)


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
        time.sleep(0.5)  # The prefiller knows who asks before it has the request.
        p.say(("die after layer", 1))
        p.say(("add", "p", PROMPT, {"do_remote_decode": True, "transfer_id": "t"}))
        p.process.join(20.0)
        start = time.monotonic()
        pump("the end", lambda: d.computed.get("d") or "d" in d.ended, d, seconds=10.0)
        assert time.monotonic() - start < 5.0
        assert d._at(0, 0, 0, table, 0).eq(value(PROMPT[0], 0, 0, 0)).all() or policy == "recompute"
        if policy == "fail":
            assert "d" not in d.computed
            assert d.ended["d"].finish_reason.name == "ERROR"
        else:
            assert d.computed["d"] == len(PROMPT)
            served(d, "d", PROMPT)
        released(d)


def test_two_processes_move_requests_side_by_side() -> None:
    prompts = {f"{i}": [(i + 7 * j) % 900 for j in range(20 + i)] for i in range(6)}
    with ExitStack() as stack:
        p = stack.enter_context(Remote(config("kv_producer", tp=2), blocks=48))
        vllm = config("kv_consumer")
        (d,) = stack.enter_context(instances(Instance(vllm, blocks=48)))
        assert p.hear(120.0) == "ready"
        for number, prompt in prompts.items():
            p.say(("add", number, prompt, {"do_remote_decode": True, "transfer_id": number}))
        right = set()
        for number, prompt in prompts.items():
            deadline = time.monotonic() + 20.0
            while not (params := p.ask(("params", number))) and time.monotonic() < deadline:
                pass
            d.add(number, prompt, params)
        while len(right) < len(prompts):
            pump("a load", lambda: d.computed.keys() - right, d)
            for number in d.computed.keys() - right:
                assert d.wrong(number, prompts[number]) == []
                right.add(number)
        assert set(d.computed.values()) == {1}
        deadline = time.monotonic() + 10.0
        while p.ask(("free",)) != 47:
            assert time.monotonic() < deadline, "the prefiller's blocks stay"
        p.say(("close",))
        p.process.join(10.0)
        assert p.process.exitcode == 0


def failing(params: dict[str, Any], d: Instance, *running: Instance) -> None:
    """A load that must end in an error, with nothing computed and all blocks free again."""
    d.add("d", PROMPT, params)
    pump("the end", lambda: "d" in d.ended, d, *running, seconds=10.0)
    assert d.ended["d"].finish_reason.name == "ERROR"
    assert "d" not in d.computed
    released(d)


def test_a_name_that_was_used_twice_brings_nobody_anothers_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        params = prefill(p, "p", [t + 1 for t in PROMPT])
        failing(params, d, p)
        assert "another prompt" in caplog.text
        released(p)


def test_pages_that_were_handed_over_are_not_there_again(caplog: pytest.LogCaptureFixture) -> None:
    p, d = Instance(config("kv_producer")), Instance(config("kv_consumer"))
    with instances(p, d):
        params = prefill(p)
        d.add("first", PROMPT, dict(params))
        served(d, "first", PROMPT, p)
        released(p, d)
        assert d.scheduler.reset_prefix_cache()
        failing(params, d, p)
        assert "handed over before" in caplog.text


def test_caches_of_another_model_and_offers_of_nobody_are_refused(
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
        failing({"do_remote_prefill": True, "remote_offer": "nobody"}, d)
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


def test_blocks_that_nobody_asks_for_are_free_after_the_lease() -> None:
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


def test_what_a_step_tells_workers_travels() -> None:
    p = Instance(config("kv_producer"))
    with instances(p):
        p.add("p", PROMPT, {"do_remote_decode": True})
        told = p.scheduler.schedule().kv_connector_metadata
        assert pickle.loads(pickle.dumps(told)) == told
        shake = p.workers[0].kv_connector.get_handshake_metadata()
        assert pickle.loads(pickle.dumps(shake)) == shake


def test_what_the_connector_does_not_move_is_refused_at_the_start() -> None:
    vllm = config("kv_producer")
    p = Instance(vllm)
    with instances(p):
        groups = p.scheduler.kv_cache_config
        vllm.parallel_config.pipeline_parallel_size = 2
        with pytest.raises(InvalidArgument, match="pipeline_parallel_size is 2"):
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups)
        vllm.parallel_config.pipeline_parallel_size = 1
        groups.kv_cache_groups = groups.kv_cache_groups * 2
        with pytest.raises(InvalidArgument, match="disable-hybrid-kv-cache-manager"):
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fabric_ray")
