"""Trainers that gather from each other in a push begin it together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fabric_ray import TransferEngine
from fabric_ray.errors import WeightSyncError
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.calls import call_failure
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource
from tests.processes import Other
from tests.unit.weights.test_trainer_modules import Lora, whole_side

RANKS = 2
NAME = "q_proj.weight"


def layer() -> Lora:
    torch.manual_seed(0)
    return Lora(torch.nn.Linear(33, 71, bias=False))


def sides() -> Any:
    return whole_side({NAME: layer().base_layer.weight.detach()})


def trainer(connection: Any, rank: int, store: str, replica: bool) -> None:
    """A rank of FSDP2, whose adapters are sharded; does what it is told."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    lora = layer()
    fully_shard(lora, mesh=init_device_mesh("cpu", (RANKS,)))
    model, engine = torch.nn.ModuleDict({"q_proj": lora}), TransferEngine(transport="shm")
    if replica:
        source: Any = ReplicaSource(model, LayoutReplica(sides()), rank=rank, engine=engine)
    else:
        source = WeightSource(model, rank=rank, engine=engine)
    while (told := connection.recv()) is not None:
        if isinstance(told, bool):
            lora.disable_adapters = told
            connection.send(None)
            continue
        function, args = told
        try:
            connection.send(function(None, *args))
        except Exception as error:
            connection.send(call_failure(error)._replace(error=None))
    source.close()
    engine.close()


class Processes:
    """Trainers in processes of their own, and rollouts in this one."""

    def share(self, value: Any) -> Any:
        return value

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        if not isinstance(actors[0], Other):
            return [function(None, *each) for each in args]
        for actor, each in zip(actors, args, strict=True):
            actor.say((function, each))
        return [actor.hear(timeout + 120.0) for actor in actors]  # the first one starts them


@pytest.mark.parametrize(
    "replica",
    [
        pytest.param(False, id="shards"),
        pytest.param(True, id="replica", marks=pytest.mark.long),
    ],
)
def test_rs_1_a_trainer_that_fails_alone_leaves_no_other_waiting_in_a_gather(
    tmp_path: Path, replica: bool
) -> None:
    with ExitStack() as stack:
        store = str(tmp_path / "store")
        trainers = [
            stack.enter_context(Other(trainer, rank, store, replica)) for rank in range(RANKS)
        ]
        engine = stack.enter_context(TransferEngine(transport="shm"))
        target = WeightTarget(sides(), rank=0, engine=engine)
        stack.callback(target.close)
        sync = WeightSync(trainers, [target], timeout=20.0, calls=Processes())
        sync.connect()
        for disabled in (False, True, False):
            trainers[1].ask(disabled, 120)
            if not disabled:
                sync.push()
                continue
            with pytest.raises(WeightSyncError, match="disabled") as caught:
                sync.push()
            assert set(caught.value.failed) == {"trainer 1"}
            assert sync.version == 1
        assert torch.equal(target.weights[NAME], layer().merged())
        for other in trainers:
            other.say(None)
