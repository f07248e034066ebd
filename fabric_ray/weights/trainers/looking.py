"""The layout of a Megatron-Core trainer, found by looking at a rank's module and parallel state."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig, config_from_hf, read_config
from fabric_ray.models.kinds import ARCHITECTURES
from fabric_ray.plan import Side
from fabric_ray.weights.families.errors import InvalidRanks
from fabric_ray.weights.trainers.megatron import local_tensors, megatron_side, unwrapped
from fabric_ray.weights.trainers.ranks import Parallel
from fabric_ray.weights.trainers.tables import Experts, Layers

if TYPE_CHECKING:
    import torch

_STATE = "megatron.core.parallel_state"
# Megatron-Core's own order, and that of its `use_tp_pp_dp_mapping`.
_ORDERS = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"


def megatron_parts(
    model: torch.nn.Module | Sequence[torch.nn.Module], config: Any
) -> tuple[dict[str, torch.Tensor], Side]:
    """A rank's tensors, and what every rank holds.

    Args:
        model: the rank's module, or its parts under virtual pipeline parallelism.
        config: of the model, as Hugging Face has it: of transformers, the fields of a
            ``config.json``, its folder, or a :class:`~fabric_ray.models.ModelConfig`.

    Raises:
        InvalidArgument: it isn't a module of Megatron-Core, has another layout than this finds, or
            computes otherwise than the model.
        FamilyError: the sizes don't fit the model.
        ModelError: the model isn't known.
    """
    parts: list[Any] = list(unwrapped(model))
    state = sys.modules.get(_STATE)
    if state is None or not state.model_parallel_is_initialized():
        raise InvalidArgument(
            "config is given, and Megatron-Core's parallel state isn't initialised in this "
            "process; leave config out for other modules"
        )
    if not hasattr(parts[0], "config") or not hasattr(parts[0], "vocab_size"):
        raise InvalidArgument(
            f"a {type(parts[0]).__name__} isn't Megatron-Core's GPTModel; leave config out if its "
            "tensors describe themselves, or give a side"
        )
    parallel = _parallel(state, len(parts))
    stages = _stages(parts[0].config, parallel)
    _check_stages(parts, stages, parallel, state.get_pipeline_model_parallel_rank())
    tensors = local_tensors(model)
    # A stage may have no parameter.
    dtypes = (p.dtype for part in parts for p in part.parameters())
    dtype = str(next(dtypes, parts[0].config.params_dtype))
    known = msgspec.structs.replace(_config(config), dtype=dtype.removeprefix("torch."))
    _check_arithmetic(parts[0].config, known)
    _check_tied(parts[0], known)
    side = megatron_side(
        known,
        parallel,
        layers=_layers(parts),
        experts=_experts(tensors, parts[0].config),
        stages=stages,
        vocab_multiple=parts[0].vocab_size // parallel.tp,
    )
    return tensors, side


def _config(given: Any) -> ModelConfig:
    if isinstance(given, ModelConfig):
        return given
    if isinstance(given, str | os.PathLike):
        return read_config(Path(given))
    return config_from_hf(given if isinstance(given, Mapping) else given.to_dict())


def _parallel(state: Any, vpp: int) -> Parallel:
    import torch.distributed as dist

    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    experts = {
        "tp": state.get_expert_tensor_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "dp": state.get_expert_data_parallel_group(),
    }
    sizes = {axis: dist.get_world_size(group) for axis, group in groups.items()}
    ep, etp = (dist.get_world_size(experts[axis]) for axis in ("ep", "tp"))
    for order in _ORDERS:
        try:
            found = Parallel(**sizes, ep=ep, etp=etp, vpp=vpp, order=order)
        except InvalidRanks:
            continue
        is_so = _numbered(groups, found.steps()) and _numbered(experts, found.expert_steps())
        if is_so and found.world == dist.get_world_size():
            return found
    raise InvalidArgument(
        "Megatron-Core numbers its ranks in an order that isn't one of "
        f"{', '.join(_ORDERS)}; call WeightSource(local_tensors(model), side=megatron_side(config, "
        "Parallel(order=..., ...))), from fabric_ray.weights.trainers"
    )


def _numbered(groups: Mapping[str, Any], steps: Mapping[str, int]) -> bool:
    """Whether the ranks of each group are so far apart."""
    import torch.distributed as dist

    for axis, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        if any(b - a != steps[axis] for a, b in pairwise(ranks)):
            return False
    return True


def _stages(config: Any, parallel: Parallel) -> list[int]:
    """Layers of each stage, ``vpp`` times."""
    enums = import_module("megatron.core.transformer.enums")
    block = import_module("megatron.core.transformer.transformer_block")
    found = []
    for part in range(parallel.vpp):
        for stage in range(parallel.pp):
            if (layout := getattr(config, "pipeline_model_parallel_layout", None)) is not None:
                found.append(layout.layout[stage][part].count(enums.LayerType.decoder))
                continue
            virtual = part if parallel.vpp > 1 else None
            found.append(block.get_num_layers_to_build(config, vp_stage=virtual, pp_rank=stage))
    return found


def _check_stages(parts: Sequence[Any], stages: list[int], parallel: Parallel, stage: int) -> None:
    held = [len(part.decoder.layers) for part in parts]
    said = stages[stage :: parallel.pp]
    if held != said:
        raise InvalidArgument(
            f"this rank's stage {stage} has {held} layers, and Megatron-Core's configuration gives "
            f"it {said}; call WeightSource(local_tensors(model), side=megatron_side(config, "
            "Parallel(...), stages=[...])), from fabric_ray.weights.trainers"
        )


def _check_arithmetic(config: Any, known: ModelConfig) -> None:
    """RS-1: the same weights give other values under these settings of Megatron-Core's."""
    architecture = ARCHITECTURES[known.kind]
    expected = {"layernorm_zero_centered_gamma": architecture.centred_norms}
    if not architecture.latent:
        expected["rotary_interleaved"] = architecture.rotates_pairs
    for field, wanted in expected.items():
        found = bool(getattr(config, field, False))
        if found != wanted:
            raise InvalidArgument(
                f"{field} of Megatron-Core's configuration is {found}, expected {wanted}, since "
                f"weights of {known.kind} mean something else otherwise; train with "
                f"{field}={wanted}"
            )


def _check_tied(part: Any, known: ModelConfig) -> None:
    """RS-1: else a head that is trained by itself would be taken for the embedding's copy."""
    if known.tied and not part.share_embeddings_and_output_weights:
        raise InvalidArgument(
            f"this {known.kind} ties its head to its embedding, and Megatron-Core's module does "
            "not (share_embeddings_and_output_weights is False); train with it True, or give a "
            "config of which tie_word_embeddings is false"
        )


def _layers(parts: Sequence[torch.nn.Module]) -> Layers:
    modules = (type(module).__module__ for part in parts for module in part.modules())
    # A stage without layers has what they would be made of.
    specs = (repr(getattr(part, "transformer_layer_spec", None)) for part in parts)
    return "te" if any("transformer_engine" in name for name in (*modules, *specs)) else "local"


def _experts(tensors: Mapping[str, Any], config: Any) -> Experts:
    if any(".experts.local_experts." in name for name in tensors):
        return "sequential"
    if any(".experts.linear_fc1.weight0" in name for name in tensors):
        return "grouped"
    return "grouped" if getattr(config, "moe_grouped_gemm", False) else "sequential"
