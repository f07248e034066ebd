"""A reload of a vLLM model's weights, whole or visibly not."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.integrations import framework
from fabric_ray.integrations.vllm_computed import RELOAD, keep_constants, renew_computed

if TYPE_CHECKING:
    import torch

    from fabric_ray.integrations.load_recorder import BoxRead, Landing, StridedView

_NAMED = 8
# Routers' biases are loaded in place and left out of vLLM's counts, like tensors that no checkpoint
# has.
_ROUTER_BIAS = "e_score_correction_bias"


class Reload:
    """Between the first tensor of an update and its last; inside one call of the worker, so that
    the model never computes with a part of the tensors.

    Args:
        model: what loads.
        config: the model's, as vLLM has it.
        leave: patterns of layers that may keep their old weights.
    """

    def __init__(self, model: torch.nn.Module, config: Any, leave: Sequence[str] = ()) -> None:
        self._model = model
        self._config = config
        self._leave = leave
        self._began = False
        self._biases: set[str] = set()
        # Of layers that may keep old weights: what a loader writes in place, such as biases.
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        self._steps = ExitStack()

    def begin(self) -> None:
        """Moves the model off its weights, if it has them still."""
        if not self._began:
            self._began = True
            framework(RELOAD, "vllm").initialize_layerwise_reload(self._model)
            keep_constants(self._model)
            self._kept = {path: _in_place(layer) for path, layer in self._leavable()}
            self._steps.enter_context(_kernel_steps(self._model, self._config.dtype))

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors of checkpoint format, which the model may keep."""
        self.begin()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named:
                self._note_biases([name])
                yield name, tensor

        self._note_biases(self._model.load_weights(noted()) or ())  # type: ignore[operator]

    def fill(
        self,
        layer: torch.nn.Module,
        landings: Sequence[Landing],
        boxes: Callable[[BoxRead], torch.Tensor],
    ) -> None:
        """Fills a layer as its recorded loader does, and processes it.

        Args:
            boxes: finds the values of a box.
        """
        self.begin()
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        meta = framework(f"{RELOAD}.meta", "vllm")
        info = layerwise.get_layerwise_info(layer)
        meta.materialize_layer(layer, info)
        tensors = layerwise.get_layer_tensors(layer)
        filled = set()
        for landing in landings:
            landing.fill(tensors[landing.name], boxes)
            filled.add(landing.name)
        self._note_biases(landing.target for landing in landings)
        if not filled <= meta.SKIP_LOAD_TENSORS:
            layerwise._layerwise_process(layer, info)

    def loads_itself(self, layer: torch.nn.Module, names: set[str]) -> str | None:
        """Why a layer can't be filled with tensors of these names, if it can't."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        if layerwise.is_deferred_attention_layer(layer):
            return "vLLM loads scales of attention after all other layers"
        if names & layer._non_persistent_buffers_set:
            return "it fills a buffer that isn't saved"
        return None

    def finish(self) -> None:
        """Makes the new weights the model's.

        Raises:
            WeightSyncError: layers lack tensors (RS-1); the message names them. Or none came.
        """
        if not self._began:
            raise WeightSyncError(
                "an update brought no tensor, so the model keeps its weights; give a source that "
                "yields every parameter at each update, such as ModuleSource"
            )
        for path in self._check_lacking():
            # RS-1: some of its tensors may have come, and vLLM would fill the gaps with whatever
            # memory holds.
            layer = self._model.get_submodule(path)
            _forget_loaded(layer)
            for name, tensor in self._kept[path].items():
                getattr(layer, name).data.copy_(tensor)
        tied = self._tied()
        self._finalize()
        for layer in tied:
            # RS-1: its kernel may have a copy of the weights, packed, which vLLM leaves old.
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)

    def count(self, landings: Iterable[Landing]) -> set[str]:
        """Counts what a recorded loader fills; returns layers that it fills in part."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        skipped = framework(f"{RELOAD}.meta", "vllm").SKIP_LOAD_TENSORS
        views: dict[str, set[StridedView]] = defaultdict(set)
        for landing in landings:
            if landing.tensor is not None:
                # RS-1: what is filled twice counts once, or a gap elsewhere would be missed.
                views[landing.target].add(landing.view)
                self._note_biases([landing.target])
        partly = set()
        for path, layer in self._model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            for name, tensor in layerwise.get_layer_tensors(layer).items():
                if name not in skipped:
                    filled = views[f"{path}.{name}" if path else name]
                    count = sum(math.prod(view.shape) for view in filled)
                    info.load_numel += min(count, tensor.numel())
            if 0 < info.load_numel < info.load_numel_total and not _is_vocabulary(layer, info):
                partly.add(path)
        return partly

    def check(self) -> list[str]:
        """Checks that what has been counted fills the model.

        Returns:
            layers that lack tensors and may keep old weights.

        Raises:
            WeightSyncError: as :meth:`finish` of an update of the same tensors.
        """
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if 0 < info.load_numel >= info.load_numel_total:
                layerwise._place_kernel_tensors(layer, info)
                info.load_numel_total = None
        return self._check_lacking()

    def restore(self) -> None:
        """Puts all tensors back; nothing has been loaded."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        self._model._do_torchao_reload = self._model._original_do_torchao_reload
        self._steps.close()
        self._began = False

    def abandon(self) -> None:
        """Puts the old tensors back into layers that aren't complete; complete ones are new. The
        model can compute, and a further update begins anew."""
        if not self._began:
            return
        for layer in self._model.modules():
            # RS-3: what is buffered here would count for the next update as well.
            _forget_loaded(layer)
        self._finalize()

    def _finalize(self) -> None:
        with self._steps:
            self._keep_packed()
            with _default_dtype(self._config.dtype):
                framework(RELOAD, "vllm").finalize_layerwise_reload(self._model, self._config)
            for layer in self._model.modules():
                renew_computed(layer)

    def _keep_packed(self) -> None:
        """Leaves layers of attention as they are that have packed and released a parameter of
        which no new one has come: vLLM would pack it again."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if layerwise.is_deferred_attention_layer(layer) and info.can_load():
                parts = [layerwise.get_layerwise_info(part) for part in layer.children()]
                kept = [part.kernel_tensors[0] for part in parts if part.can_load()]
                if any(not tensor.numel() for own in kept for tensor in own.values()):
                    layerwise._place_kernel_tensors(layer, info)
                    info.reset()

    def _note_biases(self, names: Iterable[str]) -> None:
        self._biases |= {name for name in names if name.endswith("bias")}

    def _check_lacking(self) -> list[str]:
        """Returns the lacking layers that may keep old weights; raises if there are others."""
        found = self._lacking()
        leavable = dict(self._leavable())
        left = [name for name in found if name in leavable]
        if lacking := [n for n in found if n not in left] + self._without_bias():
            named = ", ".join(lacking[:_NAMED]) + (" ..." if len(lacking) > _NAMED else "")
            raise WeightSyncError(
                f"{len(lacking)} layers of vLLM's model lack tensors of the update: {named}; send "
                "every parameter of the model, or name what may keep old weights: "
                'leave=["visual.*"]'
            )
        return left

    def _leavable(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Layers that may keep old weights."""
        for name, layer in self._model.named_modules():
            if any(fnmatchcase(name, pattern) for pattern in self._leave):
                yield name, layer

    def _lacking(self) -> list[str]:
        """Layers of which tensors are missing. vLLM leaves them as they are if all are, and fills
        gaps with whatever memory holds."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        skipped = framework(f"{RELOAD}.meta", "vllm").SKIP_LOAD_TENSORS
        tied = self._tied()
        found = []
        for name, layer in self._model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            # Scales of attention have defaults.
            if not info.can_load() or layerwise.is_deferred_attention_layer(layer):
                continue
            if layer in tied or _is_vocabulary(layer, info):
                continue
            parameters = layer.named_parameters(recurse=False)
            total = sum(_load_numel(tensor) for key, tensor in parameters if key not in skipped)
            if info.load_numel < total:
                found.append(name)
        return found

    def _tied(self) -> set[torch.nn.Module]:
        """Layers that have no tensors but those of layers that have come."""
        layerwise = framework(f"{RELOAD}.layerwise", "vllm")
        infos = {layer: layerwise.get_layerwise_info(layer) for layer in self._model.modules()}
        new = set()
        for layer, info in infos.items():
            if not info.can_load():
                new |= {id(tensor) for tensor in layer.parameters(recurse=False)}
            elif _is_vocabulary(layer, info):
                new |= {id(tensor) for tensor in info.kernel_tensors[0].values()}
        return {
            layer
            for layer, info in infos.items()
            if info.can_load()
            and info.load_numel == 0
            and (own := info.kernel_tensors[0])
            and all(id(tensor) in new for tensor in own.values())
        }

    def _without_bias(self) -> list[str]:
        """Routers whose bias did not come."""
        # A router and its experts have the same, which some routers call `expert_bias`.
        names: dict[int, list[str]] = defaultdict(list)
        named = (self._model.named_parameters, self._model.named_buffers)
        for name, tensor in chain(*(each(remove_duplicate=False) for each in named)):
            if name.endswith("bias"):
                names[id(tensor)].append(name)
        found = []
        for own in names.values():
            if not any(name.endswith(_ROUTER_BIAS) for name in own):
                continue
            layers = [name.rpartition(".")[0] for name in own]
            came = any(_is_same(name, other) for name in own for other in self._biases)
            left = any(fnmatchcase(layer, p) for layer in layers for p in self._leave)
            if not came and not left:
                found.append(layers[0])
        return found


def _in_place(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors that a reload leaves in a layer, and loaders write to."""
    tensors = framework(f"{RELOAD}.utils", "vllm").get_layer_tensors(layer)
    return {name: t.detach().clone() for name, t in tensors.items() if not t.is_meta}


def _forget_loaded(layer: torch.nn.Module) -> None:
    """Drops what has come for a layer that isn't complete; its old tensors are put back."""
    info = framework(f"{RELOAD}.layerwise", "vllm").get_layerwise_info(layer)
    if info.can_load():
        info.loaded_weights.clear()
        info.load_numel = 0


@contextmanager
def _kernel_steps(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Has layers processed as by a load, where vLLM's reload differs (RS-1).

    A reload leaves out the own step of the kernel of unquantised experts. Kernels for CPUs pack the
    weights in it, so they would take rows of the checkpoint for packed ones. And a reload fails at
    parameters without elements, which a layer of attention has packed and released after a load.
    """
    found: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    methods = {id(m): m for m in found if hasattr(m, "process_weights_after_loading")}
    for method in methods.values():
        method.process_weights_after_loading = partial(_process, method, dtype)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def _process(method: Any, dtype: torch.dtype, layer: torch.nn.Module) -> None:
    with _default_dtype(dtype):
        if getattr(method, "moe_kernel", None) is None:
            type(method).process_weights_after_loading(method, layer)
        else:
            _process_experts(method, layer)
    info = framework(f"{RELOAD}.layerwise", "vllm").get_layerwise_info(layer)
    for name, kernel in info.kernel_tensors[0].items() if info.kernel_tensors else ():
        own = getattr(layer, name)
        if not kernel.numel() and own.numel():
            kernel.data = own.data


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype of tensors that are made without one, which vLLM sets to the model's in a load."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _process_experts(method: Any, layer: torch.nn.Module) -> None:
    """Runs a method of experts, and its kernel's step unless the method has run it."""
    kernel, ran = method.moe_kernel, False
    experts = kernel.fused_experts
    step = experts.process_weights_after_loading

    def noted(layer: torch.nn.Module) -> None:
        nonlocal ran
        ran = True
        step(layer)

    experts.process_weights_after_loading = noted
    try:
        type(method).process_weights_after_loading(method, layer)
    finally:
        del experts.process_weights_after_loading
    if method.moe_kernel is kernel and not ran:
        step(layer)


def _is_vocabulary(layer: Any, info: Any) -> bool:
    """Whether a layer is a vocabulary of which all has come but the rows that pad it, which no
    checkpoint has."""
    if info.load_numel == 0 or not hasattr(layer, "num_embeddings_padded"):
        return False
    layerwise = framework(f"{RELOAD}.layerwise", "vllm")
    skipped = framework(f"{RELOAD}.meta", "vllm").SKIP_LOAD_TENSORS
    rows, own = layer.num_embeddings_per_partition, layer.shard_indices.num_org_elements
    tensors = layerwise.get_layer_tensors(layer).items()
    counts = (_load_numel(tensor) for name, tensor in tensors if name not in skipped)
    return bool(info.load_numel >= sum(count * own // rows for count in counts))


def _load_numel(tensor: torch.Tensor) -> int:
    """The elements that a checkpoint has of a tensor; vLLM 0.30 counts padding, too."""
    utils = framework(f"{RELOAD}.utils", "vllm")
    count = getattr(utils, "get_tensor_load_numel", lambda tensor: tensor.numel())
    return int(count(tensor))


def shared_parameters(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def names_filling(own: str) -> Iterator[str]:
    """The names that a tensor of the checkpoint may have for a parameter: its own, also without the
    prefix that the model has."""
    yield own
    for at, character in enumerate(own):
        if character == ".":
            yield own[at + 1 :]


class TieCheck:
    """RS-1: parameters that are one in a model get one value from an update."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._groups: dict[str, set[int]] = defaultdict(set)
        for number, names in enumerate(shared_parameters(model)):
            for name in (each for own in names for each in names_filling(own)):
                self._groups[name].add(number)
        self._seen: dict[int, tuple[str, bytes]] = {}

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """
        Args:
            name: of the checkpoint.
            tensor: in memory of the host.

        Raises:
            WeightSyncError: another name of the parameter came with another value.
        """
        for number in self._groups.get(name, ()):
            value = _digest(tensor)
            first, known = self._seen.setdefault(number, (name, value))
            if known != value:
                raise WeightSyncError(untied(first, name))


def untied(name: str, other: str) -> str:
    """Says that two tensors are tied in vLLM's model alone."""
    return (
        f"`{name}` and `{other}` are tied in vLLM's model, and not in the trainers'; tie them "
        "there, such as by tie_weights() of transformers, or start vLLM with --hf-overrides "
        "'{\"tie_word_embeddings\": false}'"
    )


def refuse_lossy_cast(config: Any, name: str, dtype: torch.dtype, own: torch.dtype | None) -> None:
    """RS-1: loaders cast what they are given.

    Args:
        config: the model's, as vLLM has it.
        dtype: of the tensor that comes.
        own: of the parameter that it fills, if that is known.

    Raises:
        InvalidArgument: a quantised tensor would be cast without its scales, or a plain one to
            codes.
    """
    if dtype.is_floating_point and dtype.itemsize > 1 and own is not None and _has_codes(own):
        raise InvalidArgument(
            f"`{name}` comes as {dtype} and fills a parameter of {own}: a cast would give codes "
            "without a scale; send the codes and their scales, or start vLLM with a checkpoint "
            "that isn't quantised (--quantization fp8 quantises what comes)"
        )
    quantised = getattr(config, "quantization", None) is not None
    if dtype.itemsize > 1 or quantised or own == dtype:
        return
    raise InvalidArgument(
        f"`{name}` comes as {dtype}, and the model isn't quantised: a cast would lose its scales; "
        "send the unquantised tensor, or start vLLM with the quantisation that the trainer uses"
    )


def _digest(tensor: torch.Tensor) -> bytes:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).digest()


def _has_codes(dtype: torch.dtype) -> bool:
    """Whether values of a dtype have a scale elsewhere."""
    import torch

    return dtype.itemsize == 1 and dtype not in (torch.bool, torch.float8_e8m0fnu)


def _is_same(name: str, other: str) -> bool:
    """Whether names are one, but for a prefix that a model or its checkpoint has."""
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")
