"""A reload of a vLLM model's weights, whole or visibly not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations import framework

if TYPE_CHECKING:
    import torch

_RELOAD = "vllm.model_executor.model_loader.reload"
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

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Loads a tensor of checkpoint format; the first moves the model off its weights."""
        if not self._began:
            self._began = True
            framework(_RELOAD, "vllm").initialize_layerwise_reload(self._model)
        loaded = self._model.load_weights([(name, tensor)])  # type: ignore[operator]
        self._biases |= {n for n in (name, *(loaded or ())) if n.endswith(_ROUTER_BIAS)}

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
        if lacking := self._lacking():
            named = ", ".join(lacking[:_NAMED]) + (" ..." if len(lacking) > _NAMED else "")
            raise WeightSyncError(
                f"{len(lacking)} layers of vLLM's model lack tensors of the update: {named}; send "
                "every parameter of the model, or name what may keep old weights: "
                'leave=["visual.*"]'
            )
        framework(_RELOAD, "vllm").finalize_layerwise_reload(self._model, self._config)

    def abandon(self) -> None:
        """Puts the old tensors back into layers that aren't complete; complete ones are new. The
        model can compute, and a further update begins anew."""
        if not self._began:
            return
        layerwise = framework(f"{_RELOAD}.layerwise", "vllm")
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                # RS-3: what is buffered here would count for the next update as well.
                info.loaded_weights.clear()
                info.load_numel = 0
        layerwise.finalize_layerwise_reload(self._model, self._config)

    def _lacking(self) -> list[str]:
        """Layers of which tensors are missing. vLLM leaves them as they are if all are, and fills
        gaps with whatever memory holds."""
        layerwise = framework(f"{_RELOAD}.layerwise", "vllm")
        skipped = framework(f"{_RELOAD}.meta", "vllm").SKIP_LOAD_TENSORS
        count = framework(f"{_RELOAD}.utils", "vllm").get_tensor_load_numel
        infos = {layer: layerwise.get_layerwise_info(layer) for layer in self._model.modules()}
        complete = [layer for layer, info in infos.items() if not info.can_load()]
        new = {id(tensor) for layer in complete for tensor in layer.parameters(recurse=False)}
        found = []
        for name, layer in self._model.named_modules():
            info = infos[layer]
            # Scales of attention have defaults.
            if not info.can_load() or layerwise.is_deferred_attention_layer(layer):
                continue
            # A tied layer has another's tensors.
            if all(id(tensor) in new for tensor in info.kernel_tensors[0].values()):
                continue
            # A vocabulary's rows are padded, by rows that no checkpoint has.
            if info.load_numel > 0 and hasattr(layer, "num_embeddings_padded"):
                continue
            parameters = layer.named_parameters(recurse=False)
            total = sum(count(tensor) for key, tensor in parameters if key not in skipped)
            if info.load_numel < total and not any(fnmatchcase(name, p) for p in self._leave):
                found.append(name)
        return found + self._without_bias()

    def _without_bias(self) -> list[str]:
        """Routers whose bias did not come."""
        names: dict[int, list[str]] = defaultdict(list)  # a router and its experts have the same
        named = (self._model.named_parameters, self._model.named_buffers)
        for name, tensor in chain(*(each(remove_duplicate=False) for each in named)):
            if name.endswith(_ROUTER_BIAS):
                names[id(tensor)].append(name)
        found = []
        for own in names.values():
            layers = [name.rpartition(".")[0] for name in own]
            came = any(_is_same(name, other) for name in own for other in self._biases)
            left = any(fnmatchcase(layer, p) for layer in layers for p in self._leave)
            if not came and not left:
                found.append(layers[0])
        return found


def _is_same(name: str, other: str) -> bool:
    """Whether names are one, but for a prefix that a model or its checkpoint has."""
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")
