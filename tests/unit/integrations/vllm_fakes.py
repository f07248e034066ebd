"""As much of vLLM as the weight transfer needs: its modules, a server, a model that loads by
layers and computes pages with the weights it has."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from fabric_ray.integrations.vllm_kv_content import WeightsUpdate, weights

SKIPPED = {"e_score_correction_bias"}


class _WithoutFields:
    pass


@dataclass
class _TrainerInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class ModuleSource:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module


class _Worker:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.device = model, torch.device("cpu")
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.vllm_config = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
        self.parallel_config = SimpleNamespace(enable_eplb=False)


class _Trainer:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class Info:
    """vLLM's state of a layer under reload."""

    def __init__(self) -> None:
        self.load_numel, self.load_numel_total = 0, None
        self.loaded_weights: list[Any] = []
        self.kernel_tensors: Any = None

    def can_load(self) -> bool:
        return self.load_numel_total is not None

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def first_parameter(layer: torch.nn.Module) -> torch.nn.Parameter:
    """What checkpoint tensors of the layer are loaded to."""
    return next(layer.parameters(recurse=False))


def copy_rows(parameter: torch.Tensor, rows: torch.Tensor, start: int) -> None:
    """How a parameter is loaded."""
    parameter.data[start : start + len(rows)].copy_(rows)


def deferred(layer: torch.nn.Module, info: Info) -> Any:
    """As :func:`copy_rows`, when all rows of the layer have come."""

    def online_process_loader(parameter: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        if not info.can_load():
            return  # as vLLM does
        info.loaded_weights.append((rows, start))
        info.load_numel += rows.numel()
        if info.load_numel >= info.load_numel_total:
            process(layer, info)

    online_process_loader.__wrapped__ = copy_rows  # type: ignore[attr-defined]
    return online_process_loader


def layer_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = {**layer._parameters, **layer._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def initialize(model: torch.nn.Module) -> None:
    model._original_do_torchao_reload = False
    for layer in model.modules():
        info = model.infos.setdefault(layer, Info())
        if not info.can_load():
            own = {k: p for k, p in layer._parameters.items() if p is not None}
            info.kernel_tensors = (own, {})
            own = {name: p for name, p in own.items() if name not in SKIPPED}
            info.load_numel_total = sum(p.numel() for p in own.values())
            for name, parameter in own.items():
                loads = getattr(layer, "loads", parameter.dtype)
                empty = torch.empty_like(parameter, dtype=loads, device="meta")
                layer._parameters[name] = torch.nn.Parameter(empty)
                layer._parameters[name].weight_loader = deferred(layer, info)


def finalize(model: torch.nn.Module, config: Any) -> None:
    for layer in model.modules():
        info = model.infos[layer]
        if info.can_load():
            if info.load_numel:  # with gaps, which memory fills
                process(layer, info)
            place(layer, info)
            info.reset()


def materialize(layer: torch.nn.Module, info: Info) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.is_meta:
            memory = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            layer._parameters[name] = torch.nn.Parameter(memory)


def process(layer: torch.nn.Module, info: Info) -> None:
    """Puts what has been loaded into the tensors that kernels use."""
    materialize(layer, info)
    for rows, start in info.loaded_weights:
        copy_rows(first_parameter(layer), rows, start)
    if hasattr(layer, "quant_method"):
        layer.quant_method.process_weights_after_loading(layer)
    for name, kernel in info.kernel_tensors[0].items():
        kernel.data.copy_(layer._parameters[name])
    place(layer, info)
    info.reset()


def place(layer: torch.nn.Module, info: Info) -> None:
    layer._parameters.update(info.kernel_tensors[0] if info.kernel_tensors else {})


class Packed:
    """A kernel that keeps a copy of its weights."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()


class Experts:
    """A method of experts, of which the kernel turns rows around.

    Args:
        reruns: whether the method runs its kernel's step at reloads, too.
    """

    def __init__(self, reruns: bool) -> None:
        self._reruns, self.moe_kernel = reruns, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        first = self.moe_kernel is None
        self.moe_kernel = self.moe_kernel or SimpleNamespace(fused_experts=Turned())
        if first or self._reruns:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class Turned:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight.data = layer.weight.detach().flip(0)


class Model(torch.nn.Module):
    """Three layers of two checkpoint tensors each, and one tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: dict[torch.nn.Module, Info] = {}
        for i in range(3):
            self.add_module(f"l{i}", torch.nn.Linear(4, 4, bias=False))
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.l0.weight
        for parameter in self.parameters():
            parameter.data.fill_(0)
        self.tied.quant_method = Packed()
        self.tied.quant_method.process_weights_after_loading(self.tied)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            layer = getattr(self, name.partition(".")[0])
            if name.partition(".")[2] in SKIPPED:
                layer.e_score_correction_bias.data.copy_(tensor)
                continue
            start = 2 if name.endswith("lower") else 0
            parameter = first_parameter(layer)
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None:
                loader(parameter, tensor, start)

    def versions(self) -> set[float]:
        """Versions of all weights; ``nan`` for weights that were never written."""
        assert not any(p.is_meta for p in self.parameters()), "a step would end the server"
        tensors = (*self.parameters(), self.tied.packed)
        return {x for tensor in tensors for x in tensor.flatten().tolist()}


def tensors(version: float) -> dict[str, torch.Tensor]:
    """A checkpoint, all of it of one value."""
    names = [f"l{i}.{half}" for i in range(3) for half in ("upper", "lower")]
    return {name: torch.full((2, 4), float(version)) for name in names}


def modules(version: str = "0.32.0") -> dict[str, Any]:
    """What stands in ``sys.modules`` for vLLM."""
    base = SimpleNamespace(
        WeightTransferInitInfo=_WithoutFields,
        WeightTransferUpdateInfo=_WithoutFields,
        TrainerInitInfo=_TrainerInfo,
        WeightTransferEngine=_Worker,
        TrainerWeightTransferEngine=_Trainer,
    )
    reload = SimpleNamespace(initialize_layerwise_reload=initialize)
    reload.finalize_layerwise_reload = finalize
    layerwise = SimpleNamespace(
        get_layerwise_info=lambda layer: next(
            model.infos[layer] for model in _models if layer in model.infos
        ),
        is_deferred_attention_layer=lambda layer: False,
        finalize_layerwise_reload=finalize,
        get_layer_tensors=layer_tensors,
        _get_original_loader=lambda tensor: tensor.weight_loader.__wrapped__,
        _layerwise_process=process,
        _place_kernel_tensors=place,
    )
    meta = SimpleNamespace(SKIP_LOAD_TENSORS=SKIPPED, materialize_layer=materialize)
    at = "vllm.model_executor.model_loader.reload"
    return {
        "vllm": SimpleNamespace(),
        "vllm.version": SimpleNamespace(__version__=version),
        "vllm.distributed.weight_transfer.base": base,
        at: reload,
        f"{at}.layerwise": layerwise,
        f"{at}.meta": meta,
        f"{at}.utils": SimpleNamespace(
            get_tensor_load_numel=torch.Tensor.numel, get_layer_tensors=layer_tensors
        ),
        "vllm.config": SimpleNamespace(set_current_vllm_config=nullcontext),
        "vllm.distributed.weight_transfer": SimpleNamespace(ModuleSource=ModuleSource),
    }


_models: list[Model] = []


class Server:
    """A server of one worker, and the client that talks to it."""

    def __init__(self, worker: type[Any], update_info: type[Any], init_info: type[Any]) -> None:
        self.model = Model()
        _models.append(self.model)
        self.paused = False
        self.pages: dict[str, set[float]] = {}
        self.running: list[str] = []
        self.calls: list[str] = []
        self.worker = self.weight_transfer_engine = worker(self.model)
        self._weight_update_active = False
        self.before_update = lambda: None
        self.never_resets = False
        self.weight_version = "default"
        self.timeout = 30.0
        """Seconds that a call may take, as of vLLM's client over HTTP."""
        self.loads = 0
        """Requests that wait for a connector's pages, and are admitted when the server runs."""
        self._infos = (init_info, update_info)
        self._further: list[Any] = []

    def add_worker(self) -> Model:
        """Adds a worker; returns its model."""
        model = Model()
        _models.append(model)
        self._further.append(type(self.worker)(model))
        return model

    def shutdown(self) -> None:
        for worker in (self.worker, *self._further):
            worker.shutdown()
        _models.clear()

    def answer(self, prompt: str) -> set[float]:
        """The versions of the weights that a prompt's pages were computed with."""
        assert not self.paused
        return self.pages.setdefault(prompt, self.model.versions())

    def is_paused(self) -> bool:
        return self.paused

    def pause_generation(self, mode: str) -> None:
        self.calls.append(mode)
        self.paused = True

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert self.paused
        assert reset_connector
        if self.never_resets or self.loads or (self.running and not reset_running_requests):
            return False
        self.pages.clear()
        return True

    def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    def resume_generation(self) -> None:
        self.paused, self.loads = False, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in (self.worker, *self._further):
            worker.init_transfer_engine(self._infos[0](**init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active = True
        self.worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.before_update()
            for worker in (self.worker, *self._further):
                worker.receive_weights(self._infos[1](**update_info))
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self._weight_update_active = False
        self.worker.finish_weight_update()
        if weight_version is not None:
            assert self.paused, "no token of the old weights has the new version"
            self.weight_version = weight_version


def named_weights(version: str) -> str:
    """What the KV connector calls weights of a version that the user has named."""
    update = WeightsUpdate()
    update.begin(version)
    update.finish()
    return weights()
