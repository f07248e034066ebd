"""A worker takes a place in a layout that says of it what the engine holds, and in no other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import Unsupported
from fabric_ray.integrations.sglang import FabricWorker, attach, target_open
from fabric_ray.integrations.worker_rpc import WorkerClient
from fabric_ray.plan import Container, DType, Leaf, Mesh, Shard, Side, Tensor


def layout(engines: int, name: str = "w", ranks: int = 2) -> Side:
    """Rows of a matrix, over all ranks."""
    everyone = range(engines * ranks)
    leaf = Leaf(Tensor("w", (8, 3), DType.of("bfloat16")), Mesh.line(everyone), (Shard(0),))
    return Side.of(everyone, [Container(name, DType.of("bfloat16"), leaf)])


class Runner:
    """The attributes of SGLang's model runner that a worker attaches to."""

    tp_rank, tp_size = 1, 2
    registered = False

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.remote_instance_transfer_engine_session_id = ""
        self.remote_instance_transfer_engine_weight_info: object = None

    def _register_to_engine_info_bootstrap(self) -> None:
        self.registered = bool(self.remote_instance_transfer_engine_session_id)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(transport="shm") as engine:
        yield engine


def opened(worker: FabricWorker, engines: int) -> object:
    try:
        return WorkerClient(worker.session_id).ask(target_open, (1, engines), 5.0)
    finally:
        worker.close()


def test_what_the_layout_says_must_be_what_the_engine_holds(engine: TransferEngine) -> None:
    def asked(held: dict[str, torch.Tensor], engines: int = 2, ranks: int = 2) -> str:
        worker = FabricWorker(held, layout, rank=1, ranks=ranks, engine=engine)
        return str(opened(worker, engines))

    rows = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert asked({"w": rows}) == "None"
    assert "`w` of rank 3 is bfloat16 [4, 3] in `into`" in asked({"w": torch.cat([rows] * 2)})
    assert "float32 [2, 3] in `into`" in asked({"w": rows.float()})
    assert "`bias` is" in asked({"w": rows, "bias": rows[0].clone()})
    assert "`w` of rank 3 is in the side and not" in asked({})
    assert "2 engines has 4 ranks, and engines have 3 each" in asked({"w": rows}, ranks=3)


def test_a_model_runner_reports_the_worker_as_its_session(engine: TransferEngine) -> None:
    runner = Runner()
    worker = attach(runner, lambda engines: layout(engines, "weight"), engine=engine)
    assert runner.registered
    assert runner.remote_instance_transfer_engine_session_id == worker.session_id
    weight = runner.model.weight
    info = {"weight": (weight.data_ptr(), 6, 2)}
    assert runner.remote_instance_transfer_engine_weight_info == info
    assert opened(worker, 2) is None


@pytest.mark.parametrize(
    ("runner", "server_args", "why"),
    [
        ({}, {"enable_eplb": True}, "EPLB"),
        ({}, {"init_expert_location": "counts.json"}, "init_expert_location"),
        ({}, {"hicache_storage_backend": "file"}, "hicache_storage_backend"),
        ({}, {"dp_size": 2}, "enable_dp_attention"),
        ({"pp_size": 2}, {}, "pp_size"),
        ({"is_draft_worker": True}, {}, "draft"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_rs_1_workers_that_would_keep_other_weights_are_refused(
    engine: TransferEngine, runner: dict[str, Any], server_args: dict[str, Any], why: str
) -> None:
    refused = Runner()
    vars(refused).update(runner, server_args=SimpleNamespace(**server_args))
    with pytest.raises(Unsupported, match=why):
        attach(refused, lambda engines: layout(engines, "weight"), engine=engine)
    assert not refused.registered


def test_replicas_that_share_attention_alone_are_attached(engine: TransferEngine) -> None:
    runner: Any = Runner()
    runner.server_args = SimpleNamespace(dp_size=2, enable_dp_attention=True)
    attach(runner, lambda engines: layout(engines, "weight"), engine=engine).close()
    assert runner.registered


def test_rs_1_parameters_that_sglang_replaces_get_the_next_version(engine: TransferEngine) -> None:
    runner = Runner()
    worker = attach(runner, lambda engines: layout(engines, "weight"), engine=engine)

    def replaced() -> int:
        """What post-processing after an update may do."""
        runner.model.weight = torch.nn.Parameter(runner.model.weight.detach().clone())
        return runner.model.weight.data_ptr()

    address = replaced()
    assert worker.weights_info["weight"][0] == address
    assert WorkerClient(worker.session_id).ask(target_open, (1, 2), 5.0) is None
    assert worker._target is not None
    assert worker._target._into is not None
    address = replaced()
    assert worker._target._into.tensors()["weight"].data_ptr() == address
    worker.close()
