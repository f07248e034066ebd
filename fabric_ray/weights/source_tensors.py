"""The tensors of a source: an optimizer may move them, and a checkpoint may replace them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import ParamMeta
from fabric_ray.plan.dtensor import param_meta
from fabric_ray.tensors import check_memory, is_lazy, wait_for_kernels
from fabric_ray.weights.adapters import Adapters, Factors, add, trained
from fabric_ray.weights.changes import ChangeCheck
from fabric_ray.weights.modules import Found, current, named, ties

if TYPE_CHECKING:
    import torch


class SourceTensors:
    """A module's parameters and persistent buffers, or tensors by name, and their registrations.

    Args:
        tensors: a module or a mapping; prefixes of wrappers are removed from names.
        engine: registers memory.
        rank: of the trainer, for shards.

    Raises:
        InvalidArgument: a parameter can't be pushed; the error names it.
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        engine: TransferEngine,
        rank: int = 0,
    ) -> None:
        self._source = tensors
        self._rank = rank
        self._engine = engine
        self._adapters = Adapters()
        self.tensors, merges = named(tensors)
        self._adapters.see(merges)
        # Gathered adapters, during a push.
        self._factors: dict[str, list[Factors]] = {}
        self._layouts: dict[str, _Layout] = {}
        # With the place of the memory that is registered.
        self._regions: dict[str, tuple[_Place, Region]] = {}
        _check(self.tensors)

    def refresh(self) -> None:
        """Looks the parameters up again, since a module's may be replaced or removed."""
        found, merges = named(current(self._source))
        self._adapters.see(merges)
        if isinstance(self._source, Found) or not isinstance(self._source, Mapping):
            known = self.tensors
            found = {param: trained(tensor, known.get(param)) for param, tensor in found.items()}
        self.tensors = found
        _check(self.tensors)

    def remember_layouts(self) -> None:
        """Remembers the layouts that the plan was made for."""
        self._layouts = self._current_layouts()

    def describe(self, rank: int) -> list[ParamMeta]:
        """The metadata of all tensors."""
        self.refresh()
        tied = self.ties()
        out = []
        for param, tensor in self.tensors.items():
            if tensor.numel():
                meta = param_meta(param, tensor, rank=rank)
                strides = tuple(n * tensor.element_size() for n in self.like(param).stride())
                same_as = tied.get(param, "")
                adapters = self._adapters.names(param)
                out.append(
                    msgspec.structs.replace(
                        meta, local_strides=strides, same_as=same_as, adapters=adapters
                    )
                )
        return out

    def ties(self) -> dict[str, str]:
        """Tied parameters, each with the first name of its memory."""
        own = {param: t for param, t in self.tensors.items() if not self.is_computed(param)}
        return ties(own)

    def is_computed(self, param: str) -> bool:
        """Whether each push computes the values, since no memory holds them."""
        return param in self._adapters or _is_computed(self.tensors[param])

    def watch(self, params: Collection[str]) -> ChangeCheck:
        """Notices changes of parameters and of their adapters from now on."""
        found = chain(self.tensors.items(), self._adapters.tensors())
        return ChangeCheck((param, tensor) for param, tensor in found if param in params)

    @property
    def gathers(self) -> bool:
        """Whether other ranks have to take part in :meth:`gather_adapters`."""
        return any(hasattr(tensor, "full_tensor") for _, tensor in self._adapters.tensors())

    def wait_for_kernels(self, params: Collection[str]) -> None:
        """Waits for the kernels that compute parameters: the engine's copies wait for none."""
        found = chain(self.tensors.items(), self._adapters.tensors())
        wait_for_kernels(tensor for param, tensor in found if param in params)

    def device_of(self, params: Collection[str]) -> torch.device | None:
        """The GPU that all these parameters lie on; ``None``: they lie on the host.

        Raises:
            InvalidArgument: they lie on several devices.
        """
        found = {self.tensors[param].device: param for param in params}
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise InvalidArgument(
                f"`{first}` is on {one} and `{second}` on {other}, and both are computed for each "
                "push; put all such parameters of a trainer on one device"
            )
        device = next(iter(found), None)
        return None if device is None or device.type == "cpu" else device

    def gather_adapters(self) -> None:
        """Gathers the adapters for a push, in the same order on all ranks."""
        self._factors = self._adapters.all()

    def release_adapters(self) -> None:
        """Drops the gathered adapters."""
        self._factors = {}

    @contextmanager
    def releasing_adapters(self) -> Iterator[None]:
        """Drops the gathered adapters, also after an error: they take memory of the GPU."""
        try:
            yield
        finally:
            self.release_adapters()

    def local(self, param: str) -> torch.Tensor:
        """The values of this rank's shard: its memory, or a contiguous tensor where
        :meth:`is_computed`."""
        local: torch.Tensor = _local(self.tensors[param])
        if not self.is_computed(param):
            return local
        values = local.resolve_conj().resolve_neg().contiguous()
        if param not in self._adapters:
            return values
        meta = param_meta(param, self.tensors[param], rank=self._rank)
        return add(self._factors[param], values, meta.local_runs(self._rank))

    def like(self, param: str) -> torch.Tensor:
        """A tensor with dtype, shape and strides of :meth:`local`; it may have no values."""
        tensor = self.tensors[param]
        like: torch.Tensor = _empty(tensor) if self.is_computed(param) else _inner(tensor)
        return like

    def region(self, param: str) -> Region:
        """The shard's memory, registered once for each address."""
        known = self._regions.get(param)
        if known is None:
            flat = _memory(param, self.tensors[param])
            # A NIC pays for each registration, and torch has many tensors in one segment.
            region = self._engine.register(flat, segment=flat.is_cuda)
            known = (_Place(flat.data_ptr(), flat.numel()), region)
            self._regions[param] = known
        return known[1]

    def refresh_moved(self) -> bool:
        """Drops registrations of parameters that have moved; returns whether there were any.

        Raises:
            InvalidArgument: a parameter's layout differs from the plan, or the parameter is gone.
        """
        self.refresh()
        for param in self._layouts.keys() - self.tensors.keys():
            raise InvalidArgument(
                f"parameter `{param}` has been removed; call WeightSync.connect() again"
            )
        for param, now in self._current_layouts().items():
            _storage_span(param, self.tensors[param])
            planned = self._layouts.get(param)
            if now != planned:
                raise InvalidArgument(
                    f"parameter `{param}` differs from the plan: got {now}, expected {planned}; "
                    "call WeightSync.connect() again"
                )
        return self.drop_moved()

    def drop_moved(self) -> bool:
        """Drops registrations of memory in which no parameter lies any more; returns whether there
        were any."""
        moved = [p for p, (place, _) in self._regions.items() if self._place(p) != place]
        for param in moved:
            self._regions.pop(param)
        return bool(moved)

    def close(self) -> None:
        self._regions.clear()

    def _place(self, param: str) -> _Place | None:
        """Where pushes read a parameter; ``None`` if it is gone or is computed."""
        if param not in self.tensors or self.is_computed(param):
            return None
        tensor = self.tensors[param]
        return _Place(_local(tensor).data_ptr(), _storage_span(param, tensor)[1])

    def _current_layouts(self) -> dict[str, _Layout]:
        tied = self.ties()
        return {
            param: _Layout(
                tuple((like := self.like(param)).shape),
                like.stride(),
                str(like.dtype),
                str(getattr(tensor, "placements", "")),
                self.is_computed(param),
                tied.get(param, ""),
            )
            for param, tensor in self.tensors.items()
        }


def _check(tensors: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for a tensor that can't be pushed, by name."""
    for param, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise InvalidArgument(
                f"parameter `{param}` is on {tensor.device}, expected host memory or a CUDA GPU; "
                "give a copy on the host"
            )
        check_memory(f"parameter `{param}`", _inner(tensor), lazy=True)


def _is_computed(tensor: Any) -> bool:
    """Whether a tensor is a lazy negative or conjugate, or repeats its bytes (by ``expand``).

    RS-1: the bytes at their addresses are not their values, so they are never sent directly.
    """
    local = _inner(tensor)
    dims = zip(local.shape, local.stride(), strict=True)
    return is_lazy(local) or any(size > 1 and not stride for size, stride in dims)


def _empty(tensor: Any) -> torch.Tensor:
    import torch

    local = _inner(tensor)
    return torch.empty(local.shape, dtype=local.dtype, device="meta")


class _Place(NamedTuple):
    """Memory, from a shard's first element to its last."""

    address: int
    nbytes: int


class _Layout(NamedTuple):
    """The properties of a tensor that the plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    placements: str
    computed: bool
    tied: str

    def __str__(self) -> str:
        strides = f"strides {list(self.strides)}"
        computed = " (computed for each push)" if self.computed else ""
        tied = f" (tied to `{self.tied}`)" if self.tied else ""
        return f"{self.dtype} {list(self.shape)} {strides} {self.placements}".rstrip() + (
            computed + tied
        )


def _local(tensor: Any) -> Any:
    """This rank's shard."""
    return _inner(tensor).detach()


def _inner(tensor: Any) -> Any:
    """The shard, without ``to_local()``, which autograd records."""
    return getattr(tensor, "_local_tensor", tensor)


def _storage_span(param: str, tensor: Any) -> tuple[int, int]:
    """Offset and length of a shard in its storage, in bytes.

    Raises:
        InvalidArgument: the storage is shorter, since its memory was freed.
    """
    local = _local(tensor)
    if not local.numel():
        return 0, 0
    steps = zip(local.shape, local.stride(), strict=True)
    nbytes = (1 + sum((n - 1) * stride for n, stride in steps)) * local.element_size()
    start = local.storage_offset() * local.element_size()
    if start + nbytes > local.untyped_storage().nbytes():
        raise InvalidArgument(
            f"parameter `{param}`: its memory was freed; load the parameter again"
        )
    return start, nbytes


def _memory(param: str, tensor: Any) -> Any:
    """The bytes from a shard's first element to its last, for any strides."""
    import torch

    start, nbytes = _storage_span(param, tensor)
    storage = _local(tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, start, (nbytes,), (1,)
    )
