"""The other process of the tests with Mooncake's callers: their own code, unmodified."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from fabric_ray.compat import shim_path
from tests.adapters.sources import published


def over_fabric_ray() -> None:
    """``import mooncake`` finds fabric-ray, also where what imports Mooncake's own ran before, and
    transfers need no NIC."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(
            shim_path("mooncake")
        ):
            del sys.modules[name]
    os.environ["FABRIC_RAY_TRANSPORT"] = "shm,tcp"
    sys.path.insert(0, shim_path("mooncake"))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (1000, 64), "norm": (64,), "layer": (300, 300)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def addresses(named: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in named.values()]


def lengths(named: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in named.values()]


def bytes_of(named: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """As they are; torch would send tensors by moving them to other memory."""
    return {name: tensor.numpy().tobytes() for name, tensor in named.items()}


def p2p_store() -> Any:
    """checkpoint-engine's, told of one device and no NIC."""
    over_fabric_ray()
    os.environ["RANK"] = "0"
    from checkpoint_engine.p2p_store import P2PStore

    devices = SimpleNamespace(
        device_module=SimpleNamespace(device_count=lambda: 1),
        transfer_engine_protocol="rdma",
        rdma_device=lambda rank: "",
    )
    return P2PStore(devices)


def sglang_engine() -> Any:
    """SGLang's, with its published package."""
    over_fabric_ray()
    sys.path.insert(0, str(published("sglang", "sglang").parent))  # type: ignore[union-attr]
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )

    return MooncakeTransferEngine("127.0.0.1", gpu_id=0, ib_device=None)


def checkpoint_owner(connection: Connection) -> None:
    """Registers a checkpoint, as a rank that owns one."""
    store, named = p2p_store(), tensors(7)
    store.register_named_tensors(named)
    connection.send((store.addr, addresses(named)))
    connection.recv()
    connection.send(store.unregister_named_tensors(list(named)))


def sglang_decoder(connection: Connection) -> None:
    """Registers memory that a prefiller writes to."""
    engine, named = sglang_engine(), tensors(0)
    assert engine.batch_register(addresses(named), lengths(named)) == 0
    connection.send((engine.get_session_id(), addresses(named)))
    connection.recv()
    connection.send(bytes_of(named))
    connection.recv()
    connection.send(engine.batch_deregister(addresses(named)))


def sglang_prefiller(connection: Connection) -> None:
    """Writes to it; says what its calls returned."""
    engine, named = sglang_engine(), tensors(3)
    assert engine.batch_register(addresses(named), lengths(named)) == 0
    connection.send("ready")
    session, there = connection.recv()
    codes = [
        engine.send_probe(session),
        engine.transfer_sync(session, addresses(named)[0], there[0], lengths(named)[0]),
        engine.batch_transfer_sync(session, addresses(named)[1:], there[1:], lengths(named)[1:]),
        engine.batch_transfer_sync("127.0.0.1:1", [addresses(named)[0]], [there[0]], [64]),
    ]
    connection.send(codes)


def trainer_target(connection: Connection) -> None:
    """An engine's worker that miles writes to: registers its weights with SGLang's function."""
    over_fabric_ray()
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    from tests.adapters.sources import module, run

    helpers = run(
        module("sglang.srt.model_loader.remote_instance_weight_loader_utils", "sglang"),
        {"time": __import__("time"), "logger": __import__("logging").getLogger()},
        "register_memory_region_v1",
    )
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
    info = helpers["register_memory_region_v1"](model, engine)
    connection.send((f"127.0.0.1:{engine.get_rpc_port()}", info))
    connection.recv()
    connection.send(bytes_of({name: w.detach() for name, w in model.named_parameters()}))
