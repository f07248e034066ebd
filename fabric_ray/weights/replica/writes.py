"""Which elements a loader writes, and what it keeps, by watching torch dispatch its operations."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ray.models.stored import plain_dtype

_aten = torch.ops.aten
# What loaders write with. These fill all of a view, and needn't happen to be seen.
_FILLS = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_CASTS = {_aten.copy_.default, _aten._to_copy.default}


class Part(NamedTuple):
    """The bytes of a tensor's elements."""

    begin: int
    """An address."""
    shape: tuple[int, ...]
    """The tensor's, and the bytes of an element."""
    strides: tuple[int, ...]
    """In bytes."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Part:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        return Part(tensor.data_ptr(), (*tensor.shape, size), (*strides, 1))

    @property
    def end(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return self.begin + 1 + sum((count - 1) * stride for count, stride in steps)


def filled(tensor: torch.Tensor, written: Iterable[Part]) -> int:
    """How many of a tensor's elements have been written, each counted once."""
    own, parts = Part.of(tensor), tuple(written)
    base = min(part.begin for part in (own, *parts))
    nbytes = max(part.end for part in (own, *parts)) - base
    mask = torch.zeros(nbytes, dtype=torch.bool, device="cpu")
    for part in parts:
        mask.as_strided(part.shape, part.strides, part.begin - base).fill_(True)
    elements = mask.as_strided(own.shape, own.strides, own.begin - base).all(-1)
    return int(elements.sum())


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is written while it is entered, and leaves plain copies out.

    It sees the thread that entered it, and no other.

    Args:
        tensors: by name; views of them, also by ``.data``, count as them.
        given: what the loader is given.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: dict[str, list[Part]] = defaultdict(list)
        """By name of a tensor that was written to: what was filled for certain."""
        self.casts: set[tuple[torch.dtype, torch.dtype]] = set()
        """Of what was given: casts between plain floats and other values, which lose scales."""
        self._places: dict[int, list[tuple[str, Part]]] = defaultdict(list)
        for name, tensor in tensors.items():
            if tensor.numel():
                self._places[_storage(tensor)].append((name, Part.of(tensor)))
        self._made: dict[int, Any] = {}
        self._note(given)

    def kept(self) -> bool:
        """Whether anything still has what the loader was given, or made of it."""
        if self._alive():
            gc.collect()
        return self._alive()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            self._cast(func, args, kwargs or {})
        seen = [self._write(t, func in _FILLS) for t in _written(func, args, kwargs or {})]
        if any(seen) and func in _FILLS:
            return args[0]
        out = func(*args, **(kwargs or {}))
        before = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        if before & self._made.keys():
            for tensor in _tensors(out):
                if _storage(tensor) not in before:
                    self._note(tensor)
        return out

    def _cast(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        value, dtype = args[0], kwargs.get("dtype")
        if func is _aten.copy_.default:
            value, dtype = args[1], args[0].dtype
        if _storage(value) not in self._made or dtype in (None, value.dtype):
            return
        if not (plain_dtype(value.dtype) and plain_dtype(dtype)):
            self.casts.add((value.dtype, dtype))

    def _write(self, tensor: torch.Tensor, fills: bool) -> bool:
        """Records it if it is to a tensor that is watched."""
        if not tensor.numel():
            return False
        part = Part.of(tensor)
        places = self._places.get(_storage(tensor), [])
        names = [n for n, place in places if place.begin < part.end and part.begin < place.end]
        for name in names:
            self.parts[name] += [part] if fills else []
        return bool(names)

    def _note(self, tensor: torch.Tensor) -> None:
        # A weak reference keeps the storage's address its own, though not its memory.
        storage = tensor.untyped_storage()
        self._made[_storage(tensor)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _alive(self) -> bool:
        return any(not made.expired() for made in self._made.values())


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False)]
    values += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    for argument, value in values:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
