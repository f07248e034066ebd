"""Code of checkpoint-engine, SGLang and miles that calls Mooncake's engine, as it is published."""

from __future__ import annotations

import ast
import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabric_ray.compat.mooncake import TransferEngine
from tests.adapters.mooncake_processes import (
    addresses,
    bytes_of,
    checkpoint_owner,
    lengths,
    p2p_store,
    sglang_decoder,
    sglang_prefiller,
    tensors,
    trainer_target,
)
from tests.adapters.sources import method, module, run
from tests.processes import Other

MILES = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed"


@pytest.fixture(autouse=True)
def without_nics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm,tcp")


def test_checkpoint_engine_reads_a_checkpoint_from_its_owner() -> None:
    with Other(checkpoint_owner) as other:
        owner, there = other.hear(120)
        store, named = p2p_store(), tensors(8)
        store.register_named_tensors(named)
        where = addresses(named), there, lengths(named)
        store.batch_transfer_sync_read(owner, *where)
        assert all(torch.equal(named[name], tensor) for name, tensor in tensors(7).items())
        assert other.ask("unregister") == len(named)
        with pytest.raises(AssertionError):
            store.batch_transfer_sync_read(owner, *where)
        assert store.unregister_named_tensors(list(named)) == 3


def test_sglang_writes_from_one_server_to_another() -> None:
    with Other(sglang_decoder) as decoder, Other(sglang_prefiller) as prefiller:
        assert prefiller.hear(280) == "ready"
        *worked, unreachable = prefiller.ask(decoder.hear(280), 60)
        assert worked == [0, 0, 0]
        assert unreachable < 0
        assert decoder.ask("show") == bytes_of(tensors(3))
        assert decoder.ask("deregister") == 0


def trainer(engine: Callable[[], Any]) -> dict[str, Any]:
    """miles' functions around the engine, and the method that writes."""
    import dataclasses

    ray = SimpleNamespace(
        _private=SimpleNamespace(services=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    )
    given = {
        "ray": ray,
        "torch": torch,
        "dataclasses": dataclasses,
        "TransferEngine": engine,
        "logger": logging.getLogger(),
        "Future": Future,
        "Callable": Callable,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "time": time,
    }
    utils = module(f"{MILES}.p2p_transfer_utils")
    wanted = "create_transfer_engine", "register_cpu_memory", "P2PTransferManager"
    names = run(utils, given, *wanted, "RemoteWeightInfo")
    p2p = module(f"{MILES}.p2p")
    [writes] = {
        node.name
        for klass in p2p.body
        if isinstance(klass, ast.ClassDef)
        for node in klass.body
        if isinstance(node, ast.FunctionDef) and "batch_transfer_sync_write" in ast.unparse(node)
    }
    names["write"] = run(ast.Module([method(p2p, "UpdateWeightP2P", writes)], []), names, writes)[
        writes
    ]
    return names


def test_miles_writes_weights_into_an_engine_of_sglangs() -> None:
    with Other(trainer_target) as other:
        session, info = other.hear(120)
        miles = trainer(TransferEngine)
        engine = miles["create_transfer_engine"]()
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        registry = miles["register_cpu_memory"](weights, engine)
        updater = SimpleNamespace(_transfer_engine=engine, _weight_memory_registry=registry)
        remote = miles["RemoteWeightInfo"](session, info)
        manager = miles["P2PTransferManager"](num_workers=2)
        for part in (list(weights)[:2], list(weights)[2:]):
            manager.submit(miles["write"], updater, remote, part)
        failures = [future.exception(30) for future in manager.transfer_futures]
        assert failures == [None, None]
        manager.wait_transfers()
        assert other.ask("show") == bytes_of(weights)


def test_sglang_loads_a_model_from_a_running_server() -> None:
    """The method of SGLang's loader, with what it asks another server for given to it."""
    loader = method(
        module("sglang.srt.model_loader.loader", "sglang"),
        "RemoteInstanceModelLoader",
        "load_model_from_remote_instance_by_transfer_engine",
    )
    with Other(trainer_target) as other:
        seed = other.hear(120)
        given = {
            "get_remote_instance_transfer_engine_info_per_rank": lambda url, rank: seed,
            "post_load_weights": lambda model: None,
            "logger": logging.getLogger(),
        }
        load = run(ast.Module([loader], []), given, loader.name)[loader.name]
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
        for weight in model.parameters():
            assert engine.register_memory(weight.data_ptr(), weight.nbytes) == 0
        assert load(None, model, engine, "http://seed", 0)
        loaded = {name: weight.detach() for name, weight in model.named_parameters()}
        assert other.ask("show") == bytes_of(loaded)


def test_sglangs_kv_manager_asks_for_what_is_run_here() -> None:
    """Of ``MooncakeTransferEngine``, which the test of two processes above runs."""
    found = {
        node.func.attr
        for node in ast.walk(module("sglang.srt.disaggregation.mooncake.conn", "sglang"))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.engine"
    }
    calls = "batch_register", "batch_deregister", "batch_transfer_sync", "get_session_id"
    assert found == {*calls, "send_probe"}


@pytest.mark.parametrize(
    ("dotted", "bundle"),
    [
        ("sglang.srt.distributed.device_communicators.mooncake_transfer_engine", "sglang"),
        ("sglang.srt.distributed.device_communicators.mooncake_transfer_engine", "miles-rl"),
        (f"{MILES}.p2p_transfer_utils", "miles-rl"),
    ],
)
def test_every_call_of_theirs_is_taken(dotted: str, bundle: str) -> None:
    found = {
        (node.func.attr, len(node.args))
        for node in ast.walk(module(dotted, bundle))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("self.engine", "transfer_engine")
    }
    assert found
    for name, count in found:
        signature = inspect.signature(getattr(TransferEngine, name))
        signature.bind(None, *range(count))
