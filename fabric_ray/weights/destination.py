"""A rollout's module, whose parameters hold the version in use (RS-1)."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import LocalContainer
from fabric_ray.tensors import wait_for_kernels
from fabric_ray.weights.adapters import trained
from fabric_ray.weights.local import describe_tensor
from fabric_ray.weights.modules import named, reshard
from fabric_ray.weights.readers import ReaderGate, Reading

if TYPE_CHECKING:
    import torch


# A multiple of every element size.
_ALIGN = 16


class VersionSink(ABC):
    """What a commit puts a version into, from the memory in which it arrived."""

    partly_filled = False
    """Whether the last :meth:`copy` failed, which leaves tensors of two versions."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By container, where the version lies as it arrived."""
        raise InvalidArgument("the engine keeps its weights in a layout of its own; ask the engine")

    @abstractmethod
    def check(self, containers: Sequence[LocalContainer], rank: int) -> None:
        """Raises InvalidArgument if it has no use for the containers."""

    @abstractmethod
    def check_ties(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightSyncError if containers that share memory arrived with different values."""

    @abstractmethod
    def copy(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Puts a version into use.

        Args:
            arrived: all containers by name, on the host or on the target's device; they are
                overwritten afterwards.
        """

    def check_filled(self) -> None:
        """Raises WeightSyncError if the tensors are of two versions (RS-1)."""
        if self.partly_filled:
            raise WeightSyncError(
                "a version was copied into the module only in part, so its tensors are of two "
                "versions; fix the cause in the push's error, and push again"
            )

    @abstractmethod
    def close(self) -> None:
        """Takes no more versions."""


class Destination(VersionSink):
    """The tensors that a commit copies a version into.

    Parameters keep their memory, so that tied parameters, views and captured graphs see the
    version in use too.

    Args:
        into: a module, for its parameters and persistent buffers, or tensors by name.
        gate: admits each forward pass of the module as a reader.
    """

    def __init__(
        self, into: torch.nn.Module | Mapping[str, torch.Tensor], gate: ReaderGate
    ) -> None:
        self._into = into
        self._shards: dict[str, torch.Tensor] = {}
        self._removes: list[Callable[[], None]] = []
        if not isinstance(into, Mapping):
            import torch

            disable: Any = torch.compiler.disable
            guard = _ForwardGuard(gate, self.check_filled)
            # A compiled graph would run the hooks only once, when it is traced.
            before = into.register_forward_pre_hook(disable(guard.before), prepend=True)
            after = into.register_forward_hook(disable(guard.after), always_call=True)
            self._removes = [before.remove, after.remove]

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's tensors, looked up at each call, since a module's may be replaced."""
        found = named(self._into)
        if found.merges:
            raise InvalidArgument(
                f"`{next(iter(found.merges))}` of `into` has an active adapter, which no push "
                "writes; merge or disable adapters in the rollout's module"
            )
        # FSDP shows whole parameters where it has gathered them; the shards are what a push writes.
        self._shards = {n: trained(t, self._shards.get(n)) for n, t in found.tensors.items()}
        return {n: getattr(t, "_local_tensor", t).detach() for n, t in self._shards.items()}

    def check(self, containers: Sequence[LocalContainer], rank: int) -> None:
        """Compares names, shapes and dtypes with the containers.

        Raises:
            InvalidArgument: a tensor differs, or no container fills it; the error names the first.
        """
        tensors = self.tensors()
        for c in containers:
            if c.name not in tensors:
                raise InvalidArgument(
                    f"`{c.name}` of rank {rank} is in the side and not in `into`; give the module "
                    "that the side describes"
                )
            tensor = tensors[c.name]
            if any(
                n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            ):
                raise InvalidArgument(
                    f"`{c.name}` of rank {rank} has the same memory for several elements in `into` "
                    f"(strides {list(tensor.stride())}); give its contiguous()"
                )
            found, wanted = (
                describe_tensor(tensor.dtype, tensor.shape),
                describe_tensor(c.dtype, c.shape),
            )
            if found != wanted or tensor.is_meta:
                found += " without memory" if tensor.is_meta else ""
                raise InvalidArgument(
                    f"`{c.name}` of rank {rank} is {found} in `into` and {wanted} in the side; "
                    "give the module that the side describes, with memory of its own"
                )
        filled = [tensors[c.name] for c in containers]
        for name in tensors.keys() - {c.name for c in containers}:
            if tensors[name].numel() and not any(_is_part(tensors[name], f) for f in filled):
                raise InvalidArgument(
                    f"`{name}` is in `into` and not in the side of rank {rank}, so no push would "
                    "change it; add it to the side, or register a buffer with persistent=False"
                )

    def check_ties(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightSyncError if containers that share memory here arrived with different
        values."""
        tensors = self.tensors()
        for names in _memory_groups({name: tensors[name] for name in arrived}):
            kept = _filled({name: tensors[name] for name in names}, arrived)
            for name in names:
                if not _same_bytes(kept[name], arrived[name]):
                    same = next(other for other in names if other != name)
                    raise WeightSyncError(
                        f"`{same}` and `{name}` share memory in `into`, and what arrived for them "
                        "differs; untie them in the rollout's module"
                    )

    def copy(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Fills the tensors, between kernels that read them. No reader may be inside the gate."""
        import torch

        reshard(self._into)
        tensors = self.tensors()
        # RS-1: kernels of a forward pass that has returned may still read, in another stream.
        wait_for_kernels(tensors.values())
        self.partly_filled = True
        # Parameters made in inference mode can be changed only in inference mode.
        with torch.inference_mode():
            for name, tensor in arrived.items():
                tensors[name].copy_(tensor)
        # And the next pass must not begin before copies to strided tensors have ended.
        wait_for_kernels(tensors.values())
        self.partly_filled = False

    def close(self) -> None:
        for remove in self._removes:
            remove()


class _ForwardGuard:
    """Makes commits wait for a running forward pass.

    Args:
        gate: ``None`` in a copy of the module, which no push writes.
        check: raises if the module can't be used.
    """

    def __init__(self, gate: ReaderGate | None, check: Callable[[], None]) -> None:
        self._gate = gate
        self._check = check

    def before(self, *_: Any) -> None:
        if self._gate is None:
            return
        where, call = "a forward pass", _module_call()
        reading = Reading(self._gate, lambda _: {}, self._check, where, call)
        reading.name_thread()
        self._gate.enter(reading)

    def after(self, *_: Any) -> None:
        if self._gate is not None:
            self._gate.leave_call(_module_call())

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardGuard, (None, bool)


def _module_call() -> FrameType:
    """The frame in which torch runs a module's hooks; it ends with the forward pass."""
    import torch

    frame = sys._getframe(2)
    torch_file = torch.nn.Module.__call__.__code__.co_filename
    while frame.f_code.co_filename != torch_file and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _memory_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of tensors whose memory overlaps, from the first byte to the last, in order."""
    spans = sorted(
        (str(tensor.device), *_span(tensor), position, name)
        for position, (name, tensor) in enumerate(tensors.items())
        if tensor.numel() and tensor.data_ptr()
    )
    groups: list[list[tuple[int, str]]] = []
    reach: tuple[str, int] = ("", 0)
    for device, start, end, position, name in spans:
        if device != reach[0] or start >= reach[1]:
            reach = (device, end)
            groups.append([])
        reach = (device, max(end, reach[1]))
        groups[-1].append((position, name))
    return [[name for _, name in sorted(group)] for group in groups if len(group) > 1]


def _filled(
    tensors: Mapping[str, torch.Tensor], arrived: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The values of tensors that share memory after each is filled, computed in a copy."""
    import torch

    spans = [_span(tensor) for tensor in tensors.values()]
    first = min(start for start, _ in spans) // _ALIGN * _ALIGN
    memory = torch.zeros(max(end for _, end in spans) - first, dtype=torch.uint8, device="cpu")
    made = {}
    for name, tensor in tensors.items():
        start, end = _span(tensor)
        part = memory[start - first : end - first].view(tensor.dtype)
        made[name] = part.as_strided(tensor.shape, tensor.stride())
        made[name].copy_(arrived[name])
    return made


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(*(t.cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and past its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    nbytes = (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()
    return tensor.data_ptr(), tensor.data_ptr() + nbytes


def _is_part(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in a contiguous tensor ``of``."""
    if not of.is_contiguous() or tensor.device != of.device:
        return False
    (start, end), (first, last) = _span(tensor), _span(of)
    return first <= start and end <= last
