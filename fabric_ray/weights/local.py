"""Compares a rank's tensors with the containers of its side or plan."""

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
        by: where ``containers`` come from: a side that the user gave, or the plan.

    Raises:
        InvalidArgument: a tensor differs; the error names the first.
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
        found, wanted = (
            describe_tensor(tensor.dtype, tensor.shape),
            describe_tensor(container.dtype, container.shape),
        )
        if found != wanted:
            raise InvalidArgument(
                f"`{name}` of rank {rank} is {found} here and {wanted} by the {by}; {remedy}"
            )
        if _steps(tensor) != _container_steps(container):
            raise InvalidArgument(
                f"`{name}` of rank {rank} has strides {_steps(tensor)} bytes here and "
                f"{_container_steps(container)} by the {by}; {remedy}, or a contiguous tensor"
            )


def describe_tensor(dtype: object, shape: Iterable[int]) -> str:
    """Dtype and shape, for errors."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides in bytes, of dimensions with more than one element."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride * tensor.element_size() for size, stride in dims if size > 1]


def _container_steps(container: LocalContainer) -> list[int]:
    dims = zip(container.shape, container.strides, strict=True)
    return [stride for size, stride in dims if size > 1]
