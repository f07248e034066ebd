"""A captured graph on the processor: what a call launches and computes, done again as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ray.kernels import Launcher

aten = torch.ops.aten

READS_BACK = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.bincount,
}
"""Operations whose results have shapes, or values on the host, that only the device knows."""

FROM_OR_TO_HOST = {
    torch.tensor,
    torch.as_tensor,
    torch.from_numpy,
    torch.frombuffer,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.tolist,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
}


class Waits(Exception):
    """What was called would wait for a device."""


class _NoValues(TorchFunctionMode):
    """Refuses what asks for values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FROM_OR_TO_HOST:
            raise Waits(f"{func} can't be captured")
        return func(*args, **(kwargs or {}))


class _Recorded(TorchDispatchMode):
    """Keeps what is computed, and refuses what a device can't do by itself."""

    def __init__(self, steps: list[Callable[[], None]], kept: list[Any]) -> None:
        super().__init__()
        self._steps, self._kept = steps, kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in READS_BACK or by_truth(func, args):
            raise Waits(f"{func} can't be captured")
        made = func(*args, **kwargs)
        # Kernels know it by its address alone.
        self._kept.append(made)
        given = {t.untyped_storage().data_ptr() for t in _tensors([args, kwargs])}
        found = enumerate(_tensors(made))
        fresh = [(i, t) for i, t in found if t.untyped_storage().data_ptr() not in given]
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if writes or (fresh and "empty" not in func.overloadpacket.__name__):
            self._steps.append(lambda: _again(func, args, kwargs, fresh))
        return made


class Graph:
    """What was done while it was captured; :meth:`replay` does it again, on the same memory.

    Launches go through :meth:`launcher`'s. What waits for a device, or asks it for anything, raises
    :class:`Waits` while a graph is captured.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        self._captures = False

    def launcher(self, under: Launcher) -> Launcher:
        """One whose launches are the graph's while it is captured."""
        return _Launcher(self, under)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Runs what is in it, and keeps it."""
        self._captures = True
        try:
            with _NoValues(), _Recorded(self._steps, self._kept):
                yield
        finally:
            self._captures = False

    @property
    def size(self) -> int:
        """Launches, and operations of torch."""
        return len(self._steps)

    def launched(self, launch: Callable[[], None]) -> None:
        if self._captures:
            self._steps.append(launch)
        launch()

    def replay(self) -> None:
        for step in self._steps:
            step()


class _Launcher:
    def __init__(self, graph: Graph, under: Launcher) -> None:
        self._graph, self._under = graph, under

    def launch(self, *launched: Any, **options: Any) -> None:
        self._graph.launched(lambda: self._under.launch(*launched, **options))

    def resident(self, *of: Any) -> int:
        return self._under.resident(*of)


def _again(
    func: Any, args: Any, kwargs: dict[str, Any], fresh: Sequence[tuple[int, Tensor]]
) -> None:
    made = _tensors(func(*args, **kwargs))
    for i, kept in fresh:
        kept.copy_(made[i])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def by_truth(func: Any, args: Any) -> bool:
    """Whether elements are chosen by a mask, whose number is not known."""
    if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(t.dtype == torch.bool for t in _tensors(args[1]))
