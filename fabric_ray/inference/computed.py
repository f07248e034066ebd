"""Which models the engine computes, and which it refuses rather than computing something else."""

from __future__ import annotations

from fabric_ray.models.config import ModelConfig
from fabric_ray.models.config import check_computed as check_arithmetic
from fabric_ray.models.errors import UnsupportedModel
from fabric_ray.models.kinds import SERVED


def check_computed(config: ModelConfig) -> None:
    """Refuses models of which only the parameters are known.

    Raises:
        UnsupportedModel: the kind isn't computed, or this variant of it.
    """
    check_arithmetic(config, SERVED)
    problem = None
    if config.moe is not None and config.moe.correction_bias:
        problem = "routers with a correction bias aren't computed; use a model without"
    elif config.latent is not None and config.latent.index_heads:
        problem = "sparse attention isn't computed; use a model without an indexer"
    if problem is not None:
        raise UnsupportedModel(problem, model_type=config.kind)
