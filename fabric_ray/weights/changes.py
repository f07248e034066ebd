"""Notices tensors that are changed while a push reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fabric_ray.errors import WeightSyncError


class ChangeCheck:
    """Tensors, with torch's counts of their changes in place (RS-1).

    Torch counts what optimizers and ``copy_`` do, but not what goes through ``.data``, fused
    optimizers or the memory of a larger tensor.
    """

    def __init__(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._counts = [(name, tensor, _count(tensor)) for name, tensor in tensors]

    def check(self) -> None:
        """Raises WeightSyncError, with the first name, if a tensor has changed."""
        for name, tensor, count in self._counts:
            if _count(tensor) != count:
                raise WeightSyncError(
                    f"parameter `{name}` was changed while a push read it, so its values may be of "
                    "two steps; don't train between the call of push and its return"
                )


def _count(tensor: Any) -> int:
    """Changes in place; 0 where torch doesn't count them."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_inference():
        return 0
    # A DTensor counts the changes of its shard.
    count: int = 0 if local is tensor else tensor._version
    # Views of the same memory share a count, and a push may read another view than was changed.
    if local.untyped_storage().nbytes() == local.nbytes:
        count += local._version
    return count
