"""verl's own manager, worker groups and rollout workers update weights by the backend `fabric`."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from verl.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import device as verl_device

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, ResourceError, WeightSyncError
from fabric_ray.integrations.verl import FabricCheckpointEngine
from tests.adapters.verl_actors import CONFIG, Rollout, Trainer

TRAINERS, ROLLOUTS = 2, 3


class Replica:
    """A rollout replica, as its manager sees it: workers, and calls around an update."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> None:
            self.calls.append(name)

        return call


def group(worker: type, count: int) -> RayWorkerGroup:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(
        pool, RayClassWithInitArgs(ray.remote(worker)), bin_pack=False, device_name="cpu"
    )


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    cpus = TRAINERS + ROLLOUTS
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    yield group(Trainer, TRAINERS), group(Rollout, ROLLOUTS)
    ray.shutdown()


def test_the_class_has_the_shape_of_the_published_one() -> None:
    assert CheckpointEngineRegistry.get("fabric") is FabricCheckpointEngine
    assert issubclass(FabricCheckpointEngine, CheckpointEngine)
    assert not inspect.isabstract(FabricCheckpointEngine)
    for name in CheckpointEngine.__abstractmethods__ - {"init_process_group"}:
        ours, theirs = (getattr(cls, name) for cls in (FabricCheckpointEngine, CheckpointEngine))
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs) or (
            name == "receive_weights" and inspect.isasyncgenfunction(ours)
        )


def test_verls_manager_moves_every_tensor_to_every_rollout_step_after_step(groups) -> None:
    trainers, rollouts = groups
    replica = Replica(rollouts.workers)
    manager = CheckpointEngineManager(CONFIG, trainers, [replica])
    for step in (1, 2):
        manager.update_weights(global_steps=step)
        assert rollouts.wrong(step) == [[]] * ROLLOUTS
    assert replica.calls[0] == "abort_all_requests"
    assert replica.calls[-1] == "resume_generation"


def test_rs_4_a_killed_rollout_worker_is_named_and_the_others_have_all(groups) -> None:
    trainers, rollouts = groups
    manager = CheckpointEngineManager(CONFIG, trainers, [])
    manager.build_process_group(rollouts)
    ray.get(rollouts.workers[1].die_at.remote("layers.7.weight"))
    receiving = rollouts.update_weights(global_steps=3)
    sending = trainers.update_weights(global_steps=3)
    errors = []
    for ref in (*sending, *receiving):
        try:
            ray.get(ref, timeout=30)
            errors.append("")
        except Exception as error:
            errors.append(str(error))
    # Trainer 0 serves rollouts 0 and 2, trainer 1 rollout 1.
    assert [bool(error) for error in errors] == [False, True, False, True, False]
    assert "weights did not reach rollout worker" in errors[1]
    for rank in (0, 2):
        assert ray.get(rollouts.workers[rank].wrong.remote(3)) == []


def test_a_topology_of_missing_workers_is_refused() -> None:
    with TransferEngine(transport="shm") as engine:
        rollout = FabricCheckpointEngine(1 << 20, engine=engine).prepare()
        trainer = FabricCheckpointEngine(1 << 20, is_master=False, engine=engine).prepare()
        with pytest.raises(InvalidArgument, match="2 workers are prepared, and 1 trainers and 2"):
            FabricCheckpointEngine.build_topology(1, 2, [trainer, rollout])
        with pytest.raises(InvalidArgument, match="rollout worker 0 was made as a trainer"):
            FabricCheckpointEngine.build_topology(1, 1, [trainer, trainer])
        actor, other = FabricCheckpointEngine.build_topology(2, 1, [trainer, trainer, rollout])
        assert {len(values) for values in actor.values()} == {2}
        assert {len(values) for values in other.values()} == {1}
        for dtype in ("bf16", "float8_e4m3fn", "int8"):
            with pytest.raises(InvalidArgument, match=f"{dtype}.*try bfloat16"):
                FabricCheckpointEngine(1 << 20, engine=engine, rollout_dtype=dtype)


def test_tensors_are_on_the_accelerator_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"small": torch.ones(7), "larger than a bucket": torch.ones(700_000)}

    async def updated(sender: CheckpointEngine, receiver: CheckpointEngine) -> dict[str, Any]:
        sending = asyncio.create_task(sender.send_weights(sent.items()))
        found = {name: tensor.device async for name, tensor in receiver.receive_weights()}
        await sending
        return found

    with TransferEngine(transport="shm") as engine, TransferEngine(transport="shm") as other:
        ends = [FabricCheckpointEngine(1 << 20, is_master=True, engine=engine)]
        ends.append(FabricCheckpointEngine(1 << 20, engine=other))
        for device in ("meta", "cpu"):
            monkeypatch.setattr(verl_device, "is_device_available", lambda d=device: d != "cpu")
            monkeypatch.setattr(verl_device, "get_device_name", lambda d=device: d)
            monkeypatch.setattr(verl_device, "get_device_id", lambda: 0)
            sides = FabricCheckpointEngine.build_topology(1, 1, [end.prepare() for end in ends])
            for end, side in zip(ends, sides, strict=True):
                end.init_process_group(**{name: values[0] for name, values in side.items()})
            found = asyncio.run(updated(*ends))
            assert [(name, where.type) for name, where in found.items()] == [
                (name, device) for name in sent
            ]
            for end in ends:
                end.finalize()


def caster(engine: TransferEngine) -> FabricCheckpointEngine:
    return FabricCheckpointEngine(1 << 20, is_master=True, engine=engine, rollout_dtype="bfloat16")


def test_rs_1_codes_of_one_byte_are_not_cast() -> None:
    with TransferEngine(transport="shm") as engine:
        sender = caster(engine)
        for code in (torch.int8, torch.uint8, torch.float8_e4m3fn):
            with pytest.raises(InvalidArgument, match=f"`w` is {code}.*would lose its scales"):
                sender._cast("w", torch.zeros(4, dtype=code))
        assert sender._cast("w", torch.zeros(4, dtype=torch.bool)).dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rs_1_a_rollout_of_another_dtype_gets_every_bit_where_none_is_named(
    dtype: torch.dtype,
) -> None:
    weight = torch.tensor([1 + 2**-10], dtype=dtype)  # bfloat16 has 2**-7 here
    with TransferEngine(transport="shm") as engine:
        sender = FabricCheckpointEngine(1 << 20, is_master=True, engine=engine)
        assert torch.equal(sender._cast("w", weight).to(torch.float16), weight.half())


@pytest.mark.parametrize(
    "name",
    ["mlp.gate.e_score_correction_bias", "feed_forward.expert_bias", "moe.router_bias"],
)
def test_biases_by_which_experts_are_chosen_keep_their_bits(name: str) -> None:
    with TransferEngine(transport="shm") as engine:
        sender = caster(engine)
        bias = torch.tensor([8.001, 8.002])
        assert torch.equal(sender._cast(f"model.layers.3.{name}", bias), bias)
        assert sender._cast("model.layers.3.mlp.gate.weight", bias).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({}, "yields no tensor"),
        (
            {"layers.0.q_proj.base_layer.weight": torch.ones(2), "last": torch.ones(2)},
            "`layers.0.q_proj.base_layer.wei.*",
        ),
    ],
    ids=["nothing", "bases of adapters"],
)
def test_rs_1_an_update_that_would_leave_out_what_is_trained_fails_at_both_ends(
    sent: dict[str, torch.Tensor], why: str
) -> None:
    gathered = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sent.items():
            gathered.append(name)
            yield name, tensor

    async def receive(receiver: CheckpointEngine) -> None:
        async for _ in receiver.receive_weights():
            pass

    async def update(sender: CheckpointEngine, receiver: CheckpointEngine) -> list[Any]:
        ends = (sender.send_weights(gathering()), receive(receiver))
        return await asyncio.gather(*ends, return_exceptions=True)

    with TransferEngine(transport="shm") as engine, TransferEngine(transport="shm") as other:
        ends = [FabricCheckpointEngine(1 << 20, is_master=True, engine=engine)]
        ends.append(FabricCheckpointEngine(1 << 20, engine=other))
        sides = FabricCheckpointEngine.build_topology(1, 1, [end.prepare() for end in ends])
        for end, side in zip(ends, sides, strict=True):
            end.init_process_group(**{name: values[0] for name, values in side.items()})
        errors = asyncio.run(update(*ends))
        for error, kind in zip(errors, (InvalidArgument, WeightSyncError), strict=True):
            assert isinstance(error, kind)
            assert re.search(why, str(error))
        assert gathered == list(sent), "other ranks take part in the gathers to their end"


def test_rs_4_a_trainer_without_room_takes_part_in_the_gathers_to_their_end() -> None:
    gathered = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            gathered.append(name)
            yield name, torch.ones(2)

    def full(nbytes: int) -> Any:
        raise ResourceError(f"no {nbytes} bytes are left")

    with TransferEngine(transport="shm") as engine, TransferEngine(transport="shm") as other:
        ends = [FabricCheckpointEngine(1 << 20, is_master=True, engine=engine)]
        ends.append(FabricCheckpointEngine(1 << 20, engine=other))
        sides = FabricCheckpointEngine.build_topology(1, 1, [end.prepare() for end in ends])
        ends[0].init_process_group(**{name: values[0] for name, values in sides[0].items()})
        ends[0]._outbox._engine = SimpleNamespace(alloc=full)
        with pytest.raises(ResourceError):
            asyncio.run(ends[0].send_weights(gathering()))
        assert gathered == ["a", "b"]
