"""Which models the engine computes, and which it refuses rather than computing something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fabric_ray.models.config import COMPUTED, ModelConfig
from fabric_ray.models.errors import UnsupportedModel
from fabric_ray.models.hf import CONFIG_FILE

KINDS = (*COMPUTED, "deepseek_v2")
"""Kinds that the engine computes."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "routed_scaling_factor": (None, 1, 1.0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax"),
    "norm_topk_prob": (None, False),
}
"""Values under which fields of ``config.json`` that a configuration doesn't keep change nothing."""


def check_computed(config: ModelConfig) -> None:
    """Refuses models of which only the parameters are known.

    Raises:
        UnsupportedModel: the kind isn't computed, or this variant of it.
    """
    problem = None
    if config.kind not in KINDS:
        problem = f"models of type {config.kind!r} can't be computed; use one of {', '.join(KINDS)}"
    elif config.moe is not None and config.moe.correction_bias:
        problem = "routers with a correction bias aren't computed; use a model without"
    elif config.latent is not None and config.latent.index_heads:
        problem = "sparse attention isn't computed; use a model without an indexer"
    if problem is not None:
        raise UnsupportedModel(problem, model_type=config.kind)


def check_directory(directory: Path, config: ModelConfig) -> None:
    """Refuses checkpoints whose ``config.json`` asks for what a configuration doesn't keep.

    Raises:
        UnsupportedModel: it asks for another router or for other rotary embeddings.
    """
    check_computed(config)
    if config.kind in COMPUTED:
        return  # all that matters was read into the configuration
    fields = json.loads((directory / CONFIG_FILE).read_bytes())
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    unkept = {key for key in ("attention_factor", "truncate") if scaling.get(key) is not None}
    if kind not in ("default", "yarn") or unkept:
        what = f"{min(unkept)} of " if unkept else ""
        raise UnsupportedModel(
            f"{directory / CONFIG_FILE}: {what}rotary embeddings of type {kind!r} can't be "
            f"computed for {config.kind}; use a checkpoint with 'default' or plain 'yarn'",
            model_type=config.kind,
        )
    for field, neutral in _NEUTRAL.items() if config.moe is not None else ():
        if fields.get(field) not in neutral:
            raise UnsupportedModel(
                f"{directory / CONFIG_FILE}: {field} {fields[field]!r} isn't computed; use a "
                f"checkpoint with {neutral[-1]!r}",
                model_type=config.kind,
            )
