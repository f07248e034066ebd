"""What one rank holds: tensors that an optimizer may move and a checkpoint may replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import ParamMeta
from fabric_ray.plan.dtensor import param_meta
from fabric_ray.tensors import check_memory, is_lazy
from fabric_ray.weights.adapters import Adapters, Factors, add
from fabric_ray.weights.modules import named, ties

if TYPE_CHECKING:
    import torch


class Held:
    """A module's parameters and persistent buffers, or tensors by name, and their registrations.

    Args:
        tensors: what is held; names lose what wrappers have added to them.
        engine: registers memory.
        rank: of the trainer, for what only a part of is held.

    Raises:
        InvalidArgument: a parameter that can't be pushed as it is, by name.
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
        # Of adapters, whole, while a push goes on.
        self._factors: dict[str, list[Factors]] = {}
        self._layouts: dict[str, _Layout] = {}
        self._regions: dict[str, tuple[int, Region]] = {}
        if not self.tensors:
            raise InvalidArgument("a weight source needs at least one parameter")
        _check(self.tensors)

    def refresh(self) -> None:
        """Looks the parameters up again: a module's may have been replaced, or removed."""
        found, merges = named(self._source)
        self._adapters.see(merges)
        self.tensors = {param: self._newer(param, tensor) for param, tensor in found.items()}
        _check(self.tensors)

    def note(self) -> None:
        """Remembers the layouts that a route has just been taken for."""
        self._layouts = self._now()

    def reports(self, rank: int) -> list[ParamMeta]:
        """What tensors say of themselves."""
        self.refresh()
        tied = self.ties()
        out = []
        for param, tensor in self.tensors.items():
            if tensor.numel():
                meta = param_meta(param, tensor, rank=rank)
                strides = tuple(n * tensor.element_size() for n in self.like(param).stride())
                same_as = tied.get(param, "")
                out.append(msgspec.structs.replace(meta, local_strides=strides, same_as=same_as))
        return out

    def ties(self) -> dict[str, str]:
        """Parameters that are the memory of another, and the first name of that."""
        own = {param: t for param, t in self.tensors.items() if not self.is_computed(param)}
        return ties(own)

    def is_computed(self, param: str) -> bool:
        """Whether its values lie nowhere in memory, so that each push computes them."""
        return param in self._adapters or _is_computed(self.tensors[param])

    def gather(self) -> None:
        """Takes the adapters as they are for the push that begins; with :meth:`local` alone, their
        shards would be gathered in another order on each rank."""
        self._factors = self._adapters.all()

    def let_go(self) -> None:
        """Ends what :meth:`gather` began."""
        self._factors = {}

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
        """A tensor with dtype, shape and strides of :meth:`local`, perhaps without values."""
        tensor = self.tensors[param]
        like: torch.Tensor = _empty(tensor) if self.is_computed(param) else _inner(tensor)
        return like

    def region(self, param: str) -> Region:
        """Its memory, from the first element to the last, registered once for each address."""
        known = self._regions.get(param)
        if known is None:
            flat = _memory(param, self.tensors[param])
            known = (flat.data_ptr(), self._engine.register(flat))
            self._regions[param] = known
        return known[1]

    def follow(self) -> bool:
        """Finds parameters that were given new memory; whether any registered one was.

        Raises:
            InvalidArgument: one has another shape, dtype, placement or strides than was planned
                for, or isn't there any more.
        """
        self.refresh()
        for param in self._layouts.keys() - self.tensors.keys():
            raise InvalidArgument(
                f"parameter `{param}` isn't there any more; call WeightSync.connect() again"
            )
        for param, now in self._now().items():
            _span(param, self.tensors[param])
            planned = self._layouts.get(param)
            if now != planned:
                raise InvalidArgument(
                    f"parameter `{param}` was {planned} when the route was planned and is {now} "
                    "now; call WeightSync.connect() again"
                )
        moved = [p for p, (at, _) in self._regions.items() if self.local(p).data_ptr() != at]
        for param in moved:
            self._regions.pop(param)
        return bool(moved)

    def close(self) -> None:
        self._regions.clear()

    def _now(self) -> dict[str, _Layout]:
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

    def _newer(self, param: str, tensor: Any) -> Any:
        """While FSDP has gathered a parameter, the module shows the whole one for a moment; the
        shards remain what is trained."""
        held = self.tensors.get(param)
        gathered = hasattr(held, "_local_tensor") and not hasattr(tensor, "_local_tensor")
        return held if gathered else tensor


def _check(tensors: Mapping[str, Any]) -> None:
    """Raises for what can't be pushed, by name."""
    for param, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta"):
            raise InvalidArgument(
                f"parameter `{param}` is on {tensor.device}, and weights are pushed "
                "from host memory so far; give a copy on the host"
            )
        check_memory(f"parameter `{param}`", _inner(tensor), lazy=True)


def _is_computed(tensor: Any) -> bool:
    """Lazy negatives and conjugates; tensors that repeat the same bytes (by ``expand``).

    RS-1: the bytes at their addresses are not their values, so they are never sent as they lie.
    """
    local = _inner(tensor)
    dims = zip(local.shape, local.stride(), strict=True)
    return is_lazy(local) or any(size > 1 and not stride for size, stride in dims)


def _empty(tensor: Any) -> torch.Tensor:
    import torch

    local = _inner(tensor)
    return torch.empty(local.shape, dtype=local.dtype, device="meta")


class _Layout(NamedTuple):
    """What a plan depends on."""

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
    """The shard, not by ``to_local()``, which autograd records."""
    return getattr(tensor, "_local_tensor", tensor)


def _span(param: str, tensor: Any) -> tuple[int, int]:
    """Where a shard begins in its storage and up to where it reaches, in bytes.

    Raises:
        InvalidArgument: the storage is shorter than that: its memory was freed.
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
    """The bytes from a shard's first element to its last, whatever its strides."""
    import torch

    start, nbytes = _span(param, tensor)
    storage = _local(tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, start, (nbytes,), (1,)
    )
