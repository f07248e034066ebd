"""vLLM's published scheduler, factory and connector driver run the KV connector, on both sides."""

from __future__ import annotations

import inspect
import pickle
import time
from contextlib import ExitStack, nullcontext

import pytest
from vllm.config import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv import FabricRayConnector
from tests.adapters.vllm_kv_configs import LAYERS, config
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


def test_the_connector_has_the_shape_of_the_published_class() -> None:
    assert issubclass(FabricRayConnector, KVConnectorBase_V1)
    assert not inspect.isabstract(FabricRayConnector)
    ours = {n for n, f in vars(FabricRayConnector).items() if not n.startswith("_") and callable(f)}
    ours |= KVConnectorBase_V1.__abstractmethods__ | SupportsHMA.__abstractmethods__
    for name in ours:
        theirs = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
        shapes = [
            list(inspect.signature(getattr(c, name)).parameters)
            for c in (FabricRayConnector, theirs)
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
    "other blocks": ({"block": 16}, {}, {"block": 8, "tp": 2}, {"layout": "BLNHC"}),
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


def test_requests_that_name_no_transfer_get_each_their_own_pages() -> None:
    # What vLLM's proxies for its NIXL connector send with a prompt.
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": None}
    asked |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    prompts = {f"cmpl-{i}": [(i + 7 * j) % 900 for j in range(20 + i)] for i in range(3)}
    p, d = Instance(config("kv_producer"), blocks=48), Instance(config("kv_consumer"), blocks=48)
    with instances(p, d):
        params = {name: prefill(p, name, prompt, **asked) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            d.add(f"at the decoder {name}", prompt, params[name])
            served(d, f"at the decoder {name}", prompt, p)
        assert set(d.computed.values()) == {1}
        released(p, d, free=47)


def test_what_a_step_tells_workers_travels() -> None:
    p = Instance(config("kv_producer"))
    with instances(p):
        p.add("p", PROMPT, {"do_remote_decode": True})
        told = p.scheduler.schedule().kv_connector_metadata
        assert pickle.loads(pickle.dumps(told)) == told
        handshake = p.workers[0].kv_connector.get_handshake_metadata()
        assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_what_the_connector_does_not_move_is_refused_at_the_start() -> None:
    vllm = config("kv_producer")
    p = Instance(vllm)
    with instances(p):
        groups = p.scheduler.kv_cache_config
        vllm.parallel_config.decode_context_parallel_size = 2
        with pytest.raises(InvalidArgument, match="decode_context_parallel_size is 2"):
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups)
        vllm.parallel_config.decode_context_parallel_size = 1


@pytest.mark.parametrize("gigabytes", [0, 4])
@pytest.mark.parametrize("prefixes", [False, True])
def test_rs_1_images_that_vllm_does_not_hash_are_refused_at_the_start(
    gigabytes: int, prefixes: bool
) -> None:
    vllm = config("kv_producer")
    p = Instance(vllm)
    with instances(p):
        groups = p.scheduler.kv_cache_config
        vllm.cache_config.enable_prefix_caching = prefixes
        FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups)  # without images
        media = MultiModalConfig(mm_processor_cache_gb=gigabytes)
        vllm.model_config.multimodal_config = media
        refused = not gigabytes and not prefixes
        why = "mm-processor-cache-gb is 0 and --no-enable-prefix-caching"
        with pytest.raises(InvalidArgument, match=why) if refused else nullcontext():
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, groups)
