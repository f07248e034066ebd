"""Pushes by the calls of miles' updater, to engines that pack and unpack as SGLang's published code
does. The engines live in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.miles import UpdateWeightFabric
from fabric_ray.integrations.sglang import FabricWorker, _Parameters
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import EngineHooks, WeightSource
from tests.adapters.sources import method, module, names, run

SCHEME = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe"
EXPERTS, IN, OUT = 2, 32, 16
SHAPES = {
    "w13_weight_packed": (EXPERTS, IN // 8, 2 * OUT),
    "w2_weight_packed": (EXPERTS, OUT // 8, IN),
    "w13_weight_scale": (EXPERTS, 1, 2 * OUT),
    "w2_weight_scale": (EXPERTS, 1, IN),
}


def trained(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        name: torch.randint(-(2**31), 2**31 - 1, shape, generator=made, dtype=torch.int32)
        for name, shape in SHAPES.items()
    }


def layout(engines: int) -> Side:
    mesh = Mesh.line(range(engines))
    wholes = [Tensor(name, shape, DType.of("int32")) for name, shape in SHAPES.items()]
    leaves = [Leaf(whole, mesh, (Replicate(),)) for whole in wholes]
    return Side.of(
        engines, [Container(leaf.tensor.name, DType.of("int32"), leaf) for leaf in leaves]
    )


def repacked(packed: torch.Tensor, _: Any, size_k: int, size_n: int, bits: int) -> torch.Tensor:
    """Another order and another shape, as Marlin's."""
    return packed.flip(1, 2).reshape(len(packed), size_k // 16, size_n * bits // 2)


class Scheme:
    """What SGLang does of packed experts before and after they are loaded."""

    num_bits, packed_factor, actorder, sym, group_size = 4, 8, None, True, -1

    def __init__(self) -> None:
        kernels = {
            "torch": torch,
            "gptq_marlin_moe_repack": repacked,
            "marlin_moe_permute_scales": lambda scale, *_: scale.flip(2),
        }
        tree = module(SCHEME)
        for name in ("process_weights_after_loading", "restore_weights_before_loading"):
            function = method(tree, "CompressedTensorsWNA16MoE", name)
            tree.body.append(function)
            setattr(self, name, partial(run(tree, kernels, name)[name], self))


class Engine:
    """Its methods are those of miles' ``SGLangEngine``, of one worker.

    Args:
        packs: whether it computes with packed weights.
    """

    def __init__(self, engine: TransferEngine, packs: bool) -> None:
        self.model: Any = torch.nn.Module()
        none = torch.empty(EXPERTS, 0, dtype=torch.int32)
        indices = dict.fromkeys(("w13_weight_g_idx", "w2_weight_g_idx"), none)
        for name, tensor in (trained(0) | indices).items():
            parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            self.model.register_parameter(name, parameter)
        self.model._original_shapes = dict(SHAPES)
        self.packs, self.scheme = packs, Scheme()
        if packs:
            self.scheme.process_weights_after_loading(self.model)
        self.worker = FabricWorker(
            _Parameters(self.model), layout, rank=0, ranks=1, engine=engine, hooks=Hooks(self)
        )
        self.running, self.broken, self.loses = True, "", False
        self.told_to_stop = self.was_filled_while_it_ran = False

    def get_remote_instance_transfer_engine_info(self, rank: int) -> tuple[str, Any]:
        return self.worker.session_id, {}

    def pause_generation(self, mode: str) -> None:
        """Returns before the scheduler has stopped."""
        self.told_to_stop = True

    def flush_cache(self) -> None:
        self._answered_by_scheduler()

    def update_weight_version(self, weight_version: str) -> None: ...

    def continue_generation(self) -> None:
        self.told_to_stop, self.running = False, True

    def post_process_weights(
        self,
        restore_weights_before_load: bool = False,
        post_process_quantization: bool = False,
        post_load_weights: bool = False,
    ) -> None:
        self._answered_by_scheduler()
        if restore_weights_before_load and self.packs:
            self.scheme.restore_weights_before_loading(self.model)
        if post_process_quantization and self.packs:
            self.scheme.process_weights_after_loading(self.model)

    def _answered_by_scheduler(self) -> None:
        self.running = not self.told_to_stop

    def has(self, version: int) -> bool:
        """Whether it computes with the version."""

        def made(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not self.packs:
                return tensor
            if name.endswith("scale"):
                return tensor.flip(2)
            return repacked(tensor, None, tensor.shape[1] * 8, tensor.shape[2], 4)

        return all(
            torch.equal(self.model.get_parameter(name), made(name, tensor))
            for name, tensor in trained(version).items()
        )


class Hooks(EngineHooks):
    """Around the copy of a version into the weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def pause_generation(self) -> None:
        self._engine.was_filled_while_it_ran |= self._engine.running
        if self._engine.loses:
            del self._engine.model.w2_weight_scale


class Handle:
    """Calls an engine as a handle of Ray's does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        def remote(**arguments: Any) -> Any:
            if name == self._engine.broken:
                return ray.exceptions.RaySystemError("not now")
            return getattr(self._engine, name)(**arguments)

        return SimpleNamespace(remote=remote)


def got(answer: Any, timeout: float) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class Team:
    """A trainer and two engines."""

    def __init__(self, quant_method: str | None, mode: str = "retract") -> None:
        self._own = [TransferEngine(transport="shm") for _ in range(3)]
        self.engines = [Engine(engine, quant_method is not None) for engine in self._own[:2]]
        self.handles = [Handle(engine) for engine in self.engines]
        self.weights = trained(0)
        self.updater = UpdateWeightFabric(
            SimpleNamespace(rollout_num_gpus_per_engine=1, pause_generation_mode=mode),
            [],
            weights_getter=lambda: self.weights,
            model_name="",
            quantization_config={"quant_method": quant_method} if quant_method else None,
            source=lambda updater: WeightSource(self.weights, rank=0, engine=self._own[2]),
            options={"digest": True, "timeout": 5.0},
        )

    def connect(self) -> None:
        self.updater.connect_rollout_engines(self.handles, None, [1, 1])

    def update(self, version: int) -> None:
        for name, tensor in trained(version).items():
            self.weights[name].copy_(tensor)
        self.updater.update_weights()

    def close(self) -> None:
        self.updater._source.close()
        for engine in self.engines:
            engine.worker.close()
        for own in self._own:
            own.close()


@pytest.fixture
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(ray, "get", got)
    team = Team(*request.param)
    try:
        team.connect()
        yield team
    finally:
        team.close()


@pytest.mark.parametrize("team", [("compressed-tensors",)], indirect=True)
def test_rs_3_packed_experts_get_each_version_and_none_runs_that_was_packed_twice(
    team: Team,
) -> None:
    for version in (1, 2):
        team.update(version)
        for engine in team.engines:
            assert engine.has(version)
            assert engine.running
    team.engines[1].worker.close()
    with pytest.raises(WeightSyncError, match="its process has ended"):
        team.update(3)
    for engine in team.engines:
        assert engine.has(2) or not engine.running


@pytest.mark.parametrize("team", [(None,)], indirect=True)
def test_rs_3_an_engine_of_half_a_version_stands_still_until_it_has_a_whole_one(
    team: Team,
) -> None:
    half, other = team.engines
    half.loses = True
    with pytest.raises(WeightSyncError, match="w2_weight_scale"):
        team.update(1)
    assert not half.running
    half.loses, half.model.w2_weight_scale = (
        False,
        torch.nn.Parameter(
            torch.zeros(SHAPES["w2_weight_scale"], dtype=torch.int32), requires_grad=False
        ),
    )
    for broken in ("pause_generation", "flush_cache"):
        other.broken = broken
        with pytest.raises(WeightSyncError, match="not now"):
            team.update(2)
        assert not half.running
        assert other.running
        assert other.has(1)
    other.broken = ""
    team.update(2)
    assert all(engine.running and engine.has(2) for engine in team.engines)


@pytest.mark.parametrize("team", [(None, "retract"), (None, "in_place")], indirect=True)
def test_rs_3_weights_change_when_the_scheduler_has_stopped(team: Team) -> None:
    mixin = module("sglang.srt.managers.scheduler_update_weights_mixin")
    answered = method(mixin, "SchedulerUpdateWeightsMixin", "post_process_weights")
    assert "_quiesce_for_weight_update" in names(answered)
    team.update(1)
    assert all(engine.running and engine.has(1) for engine in team.engines)
    assert not any(engine.was_filled_while_it_ran for engine in team.engines)
