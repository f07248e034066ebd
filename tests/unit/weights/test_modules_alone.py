"""Modules at both ends, without a word about their layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan.errors import DtypeMismatch, MissingTensors, PlanError
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.replica.gathering import Gathering
from fabric_ray.weights.source_tensors import SourceTensors
from tests.processes import Other
from tests.unit.weights.local_sync import InProcess
from tests.unit.weights.test_trainer_modules import Lora


class Model(torch.nn.Module):
    """A tied head, a stack of experts as transformers 5 makes it, and a buffer."""

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(6, 4, dtype=dtype)
        self.lm_head = torch.nn.Linear(4, 6, bias=False, dtype=dtype)
        self.experts = torch.nn.Module()
        self.experts.gate_up_proj = torch.nn.Parameter(torch.randn(3, 10, 4).to(dtype))
        self.experts.down_proj = torch.nn.Parameter(torch.randn(3, 4, 5).to(dtype))
        self.register_buffer("bias", torch.randn(3))
        self.register_buffer("frequencies", torch.randn(3), persistent=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """With a tensor for each expert."""
        out = {name: t for name, t in self.state_dict().items() if "experts" not in name}
        for expert in range(3):
            gate, up = self.experts.gate_up_proj[expert].detach().chunk(2)
            one = f"experts.{expert}"
            out |= {f"{one}.gate_proj.weight": gate, f"{one}.up_proj.weight": up}
            out[f"{one}.down_proj.weight"] = self.experts.down_proj[expert].detach()
        return out


Ends = Callable[..., WeightSync]


@pytest.fixture
def ends(open_engine: Callable[..., TransferEngine]) -> Iterator[Ends]:
    parts: list[Any] = []

    def make(source: Any, *rollouts: Any, **options: Any) -> WeightSync:
        parts.append(WeightSource(source, name="t", engine=open_engine("t", transport="shm")))
        names = [f"r{number}" for number in range(len(rollouts))]
        for name, into in zip(names, rollouts, strict=True):
            engine = open_engine(name, transport="shm")
            parts.append(WeightTarget(into=into, name=name, engine=engine))
        first = names[: options.pop("first", len(names))]
        return WeightSync(["t"], first, calls=InProcess(), digest=True, **options)

    yield make
    for part in parts:
        part.close()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    there = other.state_dict()
    return all(torch.equal(t.to(there[n].dtype), there[n]) for n, t in one.state_dict().items())


@pytest.mark.parametrize("form", ["module", "checkpoint"])
def test_a_module_fills_any_number_of_rollouts(ends: Ends, form: str) -> None:
    model, rollouts = Model(), [Model() for _ in range(4)]
    sync = ends(model if form == "module" else model.checkpoint(), *rollouts, first=3)
    sync.push()
    assert all(same(model, rollout) for rollout in rollouts[:3])
    sync.drop(1)
    assert sync.join("r3").version == 1
    assert same(model, rollouts[3])
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    sync.connect()
    sync.push()
    assert [same(model, rollout) for rollout in rollouts] == [True, False, True, True]


def test_rollouts_of_other_modules_are_refused(ends: Ends) -> None:
    with pytest.raises(InvalidArgument, match="rollout 1 has another side than rollout 0"):
        ends(Model(), Model(), Model(tied=False)).connect()


def test_masters_are_cast_and_what_was_found_is_explained(ends: Ends) -> None:
    model, rollout = Model(), Model(dtype=torch.bfloat16)
    sync = ends(model, rollout)
    sync.push()
    assert same(model, rollout)
    summary = sync.explain()
    assert "converted from float32 to bfloat16 by its trainers: `embed_tokens.weight`" in summary
    assert "1 not sent, since it is tied to a tensor that is: `lm_head.weight`" in summary
    assert "2 sent as the tensors that it is made of: `experts.gate_up_proj`" in summary
    assert sync.explain("lm_head.weight") == (
        "`lm_head.weight` is not sent, since it is tied to a tensor that is"
    )
    assert "`embed_tokens.weight` is converted from" in sync.explain("embed_tokens.weight")
    assert "converted" not in sync.explain("bias")
    with pytest.raises(PlanError, match="nothing"):
        sync.explain("nothing")


@pytest.mark.parametrize("formats", [{}, None])
def test_casts_that_may_overflow_or_are_not_wanted_are_refused(ends: Ends, formats: Any) -> None:
    dtype = torch.float16 if formats is None else torch.bfloat16
    with pytest.raises(DtypeMismatch, match="Cast"):
        ends(Model(), Model(dtype=dtype), formats=formats).connect()


def test_a_name_that_the_trainer_lacks_is_named(ends: Ends) -> None:
    tensors = {n: t for n, t in Model().state_dict().items() if n != "bias"}
    with pytest.raises(MissingTensors, match="`bias`"):
        ends(tensors, Model()).connect()


def test_without_a_side_there_must_be_a_module(open_engine: Callable[..., TransferEngine]) -> None:
    with pytest.raises(InvalidArgument, match=r"side is missing.*WeightTarget\(into=module\)"):
        WeightTarget(engine=open_engine())


def divide(module: torch.nn.Sequential, *, tensor_parallel: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    if tensor_parallel:
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for part in (module[0], module):
        fully_shard(part, mesh=mesh["dp"])


def filled_by_pushes(connection: Any, store: str, tensor_parallel: bool) -> None:
    """Pushes from and to modules of FSDP2, before passes and after; says whether each pass computes
    with what was pushed last."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.manual_seed(0)
    trained, rollout = (
        torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.Linear(6, 4))
        for _ in range(2)
    )
    for module in (trained, rollout):
        divide(module, tensor_parallel=tensor_parallel)
    x = torch.randn(3, 8)
    for module in (trained, rollout):
        module(x)  # FSDP leaves the outermost parameters gathered
    with (
        TransferEngine(transport="shm") as sends,
        TransferEngine(transport="shm") as receives,
        closing(WeightSource(trained, name="t", engine=sends)),
        closing(WeightTarget(into=rollout, name="r", engine=receives)),
    ):
        sync = WeightSync(["t"], ["r"], calls=InProcess(), digest=True)
        for _ in range(3):
            with torch.no_grad():
                trained.reshard()  # as a backward pass does
                for parameter in trained.parameters():
                    parameter.to_local().normal_()
                trained(x)
                sync.push()
                right = [torch.equal(rollout(x), trained(x))]
                rollout.reshard()
                right.append(torch.equal(rollout(x), trained(x)))
                connection.send(right)
    dist.destroy_process_group()


@pytest.mark.parametrize("tensor_parallel", [pytest.param(False, marks=pytest.mark.long), True])
def test_rs_1_a_module_that_fsdp_has_gathered_computes_with_what_was_pushed(
    tmp_path: Path, tensor_parallel: bool
) -> None:
    with Other(filled_by_pushes, str(tmp_path / "store"), tensor_parallel) as rollout:
        assert [rollout.hear(120.0) for _ in range(3)] == [[True, True]] * 3


def sharded_by_fsdp(connection: Any, rank: int, ranks: int, store: str) -> None:
    """A rank of FSDP2; says its part of an adapted weight, and of what it should be."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layer = Lora(torch.nn.Linear(33, 71, bias=False), adapters=("default", "other"))
    plain = copy.deepcopy(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    engine = TransferEngine(transport="shm")
    model = torch.nn.ModuleDict({"q_proj": layer})
    held = SourceTensors(model, engine, rank)
    gathering = Gathering(model, {}, rank)
    gathering.whole()
    for _ in range(2):
        wanted = plain.merged().chunk(ranks)[rank]
        held.refresh()
        held.gather_adapters()
        connection.send(torch.equal(held.local("q_proj.weight"), wanted))
        ((_, whole),) = gathering
        connection.send(torch.equal(whole.chunk(ranks)[rank], wanted))
        # What the module shows from now on is of this step, and the shards go on.
        factors = [layer.lora_A["other"].weight, layer.lora_B["default"].weight]
        layer.unshard()
        with torch.no_grad():
            for factor in factors:
                factor._local_tensor.mul_(3)
            plain.lora_A["other"].weight.mul_(3)
            plain.lora_B["default"].weight.mul_(3)
    engine.close()
    dist.destroy_process_group()


def test_rs_1_adapters_that_are_sharded_themselves_are_gathered_as_trained(tmp_path: Path) -> None:
    with ExitStack() as stack:
        others = [
            stack.enter_context(Other(sharded_by_fsdp, rank, 2, str(tmp_path / "store")))
            for rank in range(2)
        ]
        assert [other.hear(180) for other in others * 4] == [True] * 8
