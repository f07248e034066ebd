"""What kernels of an exchange need on a device: sizes, memory, kernels that are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ray._native import MoeExchange
from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Device, channel, mappable, structs
from fabric_ray.moe.tokens import RowPart

#: A command names its own rank in ten bits.
_MAX_RANKS = 1024


def check_sizes(ranks: int, parts: Sequence[RowPart]) -> None:
    """That a device can take part.

    Raises:
        InvalidArgument: more ranks, or more parts of a token, than it can.
    """
    if ranks > _MAX_RANKS:
        raise InvalidArgument(f"{ranks} ranks; on a device there are {_MAX_RANKS} at most")
    if len(parts) > structs.MAX_PARTS:
        raise InvalidArgument(
            f"a token of {len(parts)} parts; a device takes {structs.MAX_PARTS}, x among them"
        )


def room_on(engine: TransferEngine, nbytes: int, device: torch.device) -> tuple[Tensor, Region]:
    """Zero bytes on a device that peers of this host can map, registered with the engine."""
    if device.type == "cpu":
        return engine.empty(nbytes, torch.uint8)
    memory = mappable(nbytes, device)
    return memory, engine.register(memory)


def gpu(device: torch.device) -> Device:
    """Launches on a GPU, all kernels of an exchange loaded.

    Raises:
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    launcher = Device(index)
    for file, kernels in {**structs.ARGUMENTS, **channel.ARGUMENTS}.items():
        launcher.load(file, *kernels)
    return launcher


@dataclasses.dataclass
class KernelResources:
    """Memory that launched kernels use."""

    device: torch.device
    what: tuple[object, ...]
    by_graph: bool = False


#: Memory of graphs that may be replayed after their exchange is gone: all their waits then end at
#: once, and nothing moves.
_KEPT_FOR_GRAPHS: list[KernelResources] = []


def is_captured(device: torch.device) -> bool:
    """Whether the current stream of a device is captured into a graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks for the stream of the current GPU
        return torch.cuda.is_current_stream_capturing()


class Mark:
    """A place in what a device's current stream has been given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.current_stream(device)
        self._captured = is_captured(device)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(self.stream)

    def wait(self) -> None:
        """What follows on the current stream waits for it, if both are of the same capture, or of
        none: a capture begins when the device is done, and a graph is over where its stream is. A
        stream that isn't captured joins the capture, as streams do that wait for its events."""
        if self._is_captured() if self._captured else not is_captured(self._device):
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def _is_captured(self) -> bool:
        """Whether its stream is captured now."""
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()


class Turns:
    """Has what an exchange launches run one after the other, on whichever streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Mark | None = None

    @contextmanager
    def next(self) -> Iterator[bool]:
        """Launches what is in it behind what was launched before; whether it is captured."""
        captured = is_captured(self._device)
        if self._device.type != "cuda":
            yield captured
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last.stream != stream:
            self._last.wait()
        try:
            yield captured
        finally:
            self._last = Mark(self._device)


def leave(native: MoeExchange, used: KernelResources) -> None:
    """Ends the waits of launched kernels, and keeps their memory until they have ended."""
    native.leave()
    if used.by_graph:
        _KEPT_FOR_GRAPHS.append(used)
    settle(native, used.device)


def settle(native: MoeExchange, device: torch.device) -> None:
    """Waits until no kernel can store to peers' memory any more; does nothing while a graph is
    captured."""
    if is_captured(device):
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    native.settled()
