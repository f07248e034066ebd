"""Autoscaling of prefillers. Serve sees none of their requests, so replicas report their load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fabric_ray.errors import InvalidArgument

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

METRIC = "prompts"
"""Prompts that are queued or computed at a replica; see ``record_autoscaling_stats``."""


def replicas_for(loads: Sequence[float], *, target: float, least: int, most: int) -> int:
    """The number of replicas that gives each ``target`` prompts, from ``least`` to ``most``."""
    wanted = math.ceil(sum(loads) / target) if loads else least
    return min(max(wanted, least), most)


def by_prompts(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """A policy for Serve: aims at ``target_ongoing_requests`` prompts for each replica."""
    loads = list((context.aggregated_metrics or {}).get(METRIC, {}).values())
    config: Any = context.config
    wanted = replicas_for(
        [float(load) for load in loads],
        target=config.get_target_ongoing_requests(),
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
    return wanted, {}


def with_policy(options: dict[str, Any]) -> dict[str, Any]:
    """Deployment options with autoscaling, if any, by prompts.

    Raises:
        InvalidArgument: ``min_replicas`` is 0.
    """
    config = options.get("autoscaling_config")
    if config is None and options.get("num_replicas") == "auto":
        config = {}
    if isinstance(config, BaseModel):  # Serve's own class
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, dict) or "policy" in config:
        return options
    if config.get("min_replicas") == 0:
        raise InvalidArgument(
            "autoscaling_config of prefill: got min_replicas 0, expected at least 1; replicas "
            "report the prompts, so without one none is ever added"
        )
    policy = {"policy_function": f"{__name__}.by_prompts"}
    return {**options, "autoscaling_config": {**config, "policy": policy}}
