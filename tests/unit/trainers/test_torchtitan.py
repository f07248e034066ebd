"""What an adapter of torchtitan does to rows is found by looking; values stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Side
from fabric_ray.plan.dtensor import container_from_dtensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.trainers import torchtitan_parts
from tests.processes import Other
from tests.unit.weights.local_sync import InProcess

Tensors = dict[str, torch.Tensor]
HEADS, WIDTH, EXPERTS = 3, 4, 2


class Layer(torch.nn.Module):
    """Queries and keys in one parameter, by heads; in the state they are two."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Linear(8, 2 * HEADS * WIDTH, bias=False)
        self.head = torch.nn.Linear(8, WIDTH, bias=False)
        self.experts = torch.nn.ParameterDict({"w": torch.randn(EXPERTS, 5, 8)})
        self.register_buffer("bias", torch.randn(EXPERTS))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: Any, state: Tensors, prefix: str, metadata: Any) -> None:
        fused = state.pop(f"{prefix}qk.weight").unflatten(0, (HEADS, 2, WIDTH))
        state[f"{prefix}q.weight"] = fused[:, 0].flatten(0, 1)
        state[f"{prefix}k.weight"] = fused[:, 1].flatten(0, 1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"0": Layer(), "1": Layer()})
        self.norm = torch.nn.LayerNorm(8, bias=False)
        self.embed = torch.nn.Embedding(6, 8)
        self.head = torch.nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight


class Adapter:
    """Names, order of rows, and what is left out."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(build=Model)

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> Tensors:
        found: Tensors = {}
        for name, tensor in state.items():
            if name.endswith("experts.w"):
                found |= {f"hf.{name}.{n}": tensor[n] for n in range(EXPERTS)}
            elif name.endswith(("q.weight", ".head.weight")):  # each head's even rows first
                pairs = tensor.unflatten(0, (-1, WIDTH // 2, 2))
                found[f"hf.{name}"] = pairs.transpose(1, 2).reshape(tensor.shape).clone()
            elif name != "head.weight":
                found[f"hf.{name}"] = tensor
        return found


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_a_module_arrives_as_its_adapter_converts_it(
    model: Model, open_engine: Callable[..., TransferEngine]
) -> None:
    tensors, side = torchtitan_parts(model, Adapter())
    held = {"qk.weight", "head.weight", "experts.w", "bias"}
    layers = {f"layers.{n}.{own}" for n in range(2) for own in held}
    assert {*tensors} == {"norm.weight", "embed.weight", *layers}
    wanted = Adapter().to_hf(model.state_dict())
    containers = [container_from_dtensor(name, t.contiguous()) for name, t in wanted.items()]
    needed = Side.of(1, containers)
    engine = open_engine()
    with (
        closing(WeightSource(tensors, side=side, name="trainer", engine=engine)),
        closing(WeightTarget(needed, rank=0, name="rollout", engine=engine)) as target,
    ):
        sync = WeightSync(["trainer"], ["rollout"], calls=InProcess(), digest=True)
        for _ in range(2):
            sync.push()
            with target.reading() as weights:
                assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
            model._apply(torch.clone)  # as `Module.to` gives it other buffers
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.normal_()
            wanted = Adapter().to_hf(model.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: 2 * tensor,
        lambda tensor: tensor.flip(-1),
        lambda tensor: tensor.transpose(0, -1),
        lambda tensor: torch.stack([one.roll(n) for n, one in enumerate(tensor.T)], 1),
        lambda tensor: tensor[:2],
        lambda tensor: torch.cat([tensor, tensor[:1]]),
    ],
    ids=["computed", "columns", "transposed", "sheared", "part", "twice"],
)
def test_an_adapter_that_does_more_is_refused(
    model: Model, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Other(Adapter):
        def to_hf(self, state: Mapping[str, torch.Tensor]) -> Tensors:
            found = super().to_hf(state)
            return {n: change(t) if "q.weight" in n else t for n, t in found.items()}

    with pytest.raises(
        InvalidArgument, match=r"does more to `layers.0.q(k|).weight` than .*gather"
    ):
        torchtitan_parts(model, Other())


def test_a_part_that_does_not_say_which_is_refused(model: Model) -> None:
    layer = model.get_submodule("layers.1")
    layer.qk.weight = torch.nn.Parameter(layer.qk.weight[:8].detach())
    with pytest.raises(InvalidArgument, match=r"`layers.1.qk.weight` is \[8, 8\], expected .*24"):
        torchtitan_parts(model, Adapter())


@pytest.mark.parametrize("trained", [True, False])
def test_rs_1_a_parameter_that_is_left_out_and_trained_is_refused(
    model: Model, trained: bool
) -> None:
    """As torchtitan's LoRA, which its adapters leave out."""
    layer = model.get_submodule("layers.1.head")
    layer.lora_a = torch.nn.Linear(8, 2, bias=False).requires_grad_(trained)
    if not trained:
        torchtitan_parts(model, Adapter())
        return
    with pytest.raises(InvalidArgument, match=r"leaves out `layers.1.head.lora_a.weight`"):
        torchtitan_parts(model, Adapter())


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_routers_bias_that_is_left_out_is_told(
    model: Model, has_bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As torchtitan's adapter of Qwen3-MoE leaves it out."""
    if has_bias:
        model.get_submodule("layers.1").register_buffer("expert_bias", torch.zeros(2))
    torchtitan_parts(model, Adapter())
    assert ("layers.1.expert_bias" in caplog.text) == has_bias


def _rank(connection: Connection, rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    adapter = Adapter()
    if rank:
        adapter.model_config.build = lambda: 1 / 0
    try:
        torchtitan_parts(Model(), adapter)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def test_rs_4_a_rank_that_fails_is_named_to_the_others_which_wait_for_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(Other(_rank, rank, f"{tmp_path}/store")) for rank in range(2)]
        assert ranks[1].hear(120.0) == "ZeroDivisionError: division by zero"
        assert "rank 1: ZeroDivisionError: division by zero" in ranks[0].hear(60.0)
