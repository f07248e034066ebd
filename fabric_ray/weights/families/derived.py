"""Tensors that engines compute from what was loaded: no parameter equals them, so none is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fabric_ray.models.config import ModelConfig
from fabric_ray.weights.families.errors import IncompleteFamily
from fabric_ray.weights.families.matching import filled, numbers_in
from fabric_ray.weights.families.rules import Derived, Family
from fabric_ray.weights.families.tables import family_of

if TYPE_CHECKING:
    import torch


def post_load(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    family: Family | None = None,
    out: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The derived tensors of one rank, by name.

    Call it after each commit, in :meth:`EngineHooks.post_process_weights
    <fabric_ray.weights.EngineHooks.post_process_weights>`.

    Args:
        config: the model.
        weights: this rank's containers.
        family: a table other than the one of ``config.kind``.
        out: what an earlier call returned. It is overwritten in place and returned, so that graphs
            and kernels that hold its tensors see the new values.

    Raises:
        IncompleteFamily: a container is missing or quantised, or ``out`` is of other containers.
    """
    table = family_of(config.kind, nest=config.nest) if family is None else family
    fresh = {
        name: derived.compute(config, *sources)
        for derived in table.derived
        for name, sources in _sources(table, derived, weights)
    }
    if out is None:
        return fresh
    if out.keys() != fresh.keys():
        odd = sorted(out.keys() ^ fresh.keys())[0]
        raise IncompleteFamily(
            f"family {table.name}: {odd} is derived from other containers than before; call "
            "post_load without `out`",
            family=table.name,
            parameter=odd,
        )
    for name, tensor in fresh.items():
        out[name].copy_(tensor)
    return out


def _sources(
    family: Family, derived: Derived, weights: Mapping[str, Any]
) -> Iterator[tuple[str, list[Any]]]:
    """Name and containers of each tensor of that kind."""
    first, *_ = derived.containers
    for container in weights:
        numbers = numbers_in(first, container)
        if numbers is None:
            continue
        names = [filled(pattern, **numbers) for pattern in derived.containers]
        for name in names:
            if name not in weights:
                raise IncompleteFamily(
                    f"family {family.name} derives {derived.name} from {name}, which this rank "
                    "doesn't hold; push that container too",
                    family=family.name,
                    parameter=name,
                )
        for name in names:
            if not weights[name].dtype.is_floating_point or weights[name].dtype.itemsize < 2:
                raise IncompleteFamily(
                    f"family {family.name} derives {derived.name} from {name}, which is "
                    f"{weights[name].dtype} here; leave that container out of the formats that the "
                    "weights are converted to",
                    family=family.name,
                    parameter=name,
                )
        yield filled(derived.name, **numbers), [weights[name] for name in names]
