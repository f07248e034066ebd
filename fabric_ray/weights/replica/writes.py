"""Which tensors an operation writes to, by watching torch dispatch it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# What loaders write with: these needn't happen to be seen.
_SKIPPED = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts elements that are written while it is entered, and leaves plain copies out.

    Args:
        tensors: by name; views of them, also by ``.data``, count as them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        """Elements written, by name."""
        self._places: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, tensor in tensors.items():
            begin = tensor.data_ptr()
            self._places[_storage(tensor)].append((begin, begin + tensor.nbytes, name))
        for places in self._places.values():
            places.sort()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        seen = False
        for tensor in _written(func, args, kwargs or {}):
            name = self._name(tensor)
            if name is not None:
                self.counts[name] += tensor.numel()
                seen = True
        if seen and func in _SKIPPED:
            return args[0]
        return func(*args, **(kwargs or {}))

    def _name(self, tensor: torch.Tensor) -> str | None:
        places = self._places.get(_storage(tensor), [])
        at = tensor.data_ptr()
        index = bisect_right(places, at, key=lambda place: place[0]) - 1
        return places[index][2] if index >= 0 and at < places[index][1] else None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False)]
    values += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    for argument, value in values:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, torch.Tensor):
                    yield one


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
