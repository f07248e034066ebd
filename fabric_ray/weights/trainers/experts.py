"""How many experts a group of a trainer's ranks owns."""

from __future__ import annotations

from fabric_ray.models.config import ModelConfig
from fabric_ray.weights.families.errors import Indivisible, InvalidRanks


def experts_per_group(config: ModelConfig, ep: int, *, family: str) -> int:
    """Experts of each of ``ep`` groups; 0 where a model has none.

    Raises:
        InvalidRanks: there are groups and no experts.
        Indivisible: they can't own equal numbers.
    """
    experts = config.moe.experts if config.moe else 0
    if ep > 1 and not experts:
        raise InvalidRanks(f"{config.kind} has no experts to spread; use ep=1", family=family)
    if experts % ep:
        raise Indivisible(
            f"{experts} experts can't be shared evenly by ep={ep}; use an ep that divides them",
            family=family,
        )
    return experts // ep
