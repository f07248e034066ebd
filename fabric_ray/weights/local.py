"""Whether a rank's tensors are what a side, or the plan that was made of it, says that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer

if TYPE_CHECKING:
    import torch


def check_local(
    tensors: Mapping[str, torch.Tensor],
    containers: Sequence[LocalContainer],
    rank: int,
    *,
    by: Literal["side", "plan"] = "side",
) -> None:
    """Compares names, shapes, dtypes and strides.

    Args:
        by: who says it: a side that the user gave, or the plan of what ranks reported.

    Raises:
        InvalidArgument: the first that differs, with what it is and what it should be.
    """
    remedy = {
        "side": "give the side of this model and these parallel sizes",
        "plan": "it has changed since it was reported; call WeightSync.connect() again",
    }[by]
    expected = {c.name: c for c in containers}
    for name in (*expected, *tensors):
        if name not in expected or name not in tensors:
            has, lacks = (by, "tensors") if name in expected else ("tensors", by)
            raise InvalidArgument(
                f"`{name}` of rank {rank} is among the {has} but not among the {lacks}; {remedy}, "
                "and give all of the rank's parameters"
            )
        container, tensor = expected[name], tensors[name]
        found, wanted = told(tensor.dtype, tensor.shape), told(container.dtype, container.shape)
        if found != wanted:
            raise InvalidArgument(
                f"`{name}` of rank {rank} is {found} here and {wanted} by the {by}; {remedy}"
            )
        if _steps(tensor) != _container_steps(container):
            raise InvalidArgument(
                f"`{name}` of rank {rank} has strides {_steps(tensor)} bytes here and "
                f"{_container_steps(container)} by the {by}; {remedy}, or a contiguous tensor"
            )


def told(dtype: object, shape: Iterable[int]) -> str:
    """A tensor in a word, for errors."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _steps(tensor: torch.Tensor) -> list[int]:
    """Bytes between neighbours, along dimensions that have any."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride * tensor.element_size() for size, stride in dims if size > 1]


def _container_steps(container: LocalContainer) -> list[int]:
    dims = zip(container.shape, container.strides, strict=True)
    return [stride for size, stride in dims if size > 1]
