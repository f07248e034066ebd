"""The engine that users open."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, overload

import msgspec
from typing_extensions import Self

from fabric_ray import _native
from fabric_ray._native import Batch, Message, Peer, Region
from fabric_ray.engine.config import EngineConfig
from fabric_ray.engine.memory import memory_of, segment_of
from fabric_ray.engine.observability import (
    Cursor,
    EngineMetrics,
    EngineRecords,
    metrics_of,
    records_of,
)
from fabric_ray.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


_opened: weakref.WeakValueDictionary[int, TransferEngine] = weakref.WeakValueDictionary()
_on_open: list[Callable[[TransferEngine], None]] = []


def _after_fork() -> None:
    # The child drops its parent's engines: threads that held their locks don't exist here, and
    # their event loops wake through the parent's sockets.
    for engine in opened():
        engine._readers.clear()
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork)


def opened() -> list[TransferEngine]:
    """The engines of this process that are open, in no order."""
    # Other threads may open engines meanwhile: references are listed in one step, engines are not.
    engines = [reference() for reference in _opened.valuerefs()]
    return [engine for engine in engines if engine is not None and not engine.closed]


def on_open(callback: Callable[[TransferEngine], None]) -> None:
    """Has every engine that is opened from now on shown to ``callback``."""
    _on_open.append(callback)


class Verdict(msgspec.Struct, frozen=True):
    """Why a transport is or isn't used towards a peer."""

    transport: str
    device: str
    """The NIC; empty where there is none."""
    chosen: bool
    reason: str

    def __str__(self) -> str:
        name = f"{self.transport} {self.device}".rstrip()
        return f"{'*' if self.chosen else ' '} {name}: {self.reason}"


class Explanation(msgspec.Struct, frozen=True):
    """An engine's way to a peer."""

    peer: str
    transport: str | None
    """The one in use; ``None`` before the first connection."""
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        head = f"{self.peer}: {self.transport or 'not connected'}"
        return "\n".join([head, *(f"  {v}" for v in self.verdicts)])


class Path(msgspec.Struct, frozen=True):
    """The way that one piece of a batch takes."""

    op: int
    """Which operation of the batch, from 0."""
    write: bool
    """Out of this engine's memory or files, or into them."""
    nbytes: int
    local: str
    """What lies at this end: ``host``, ``cuda:1``, ``file /path``."""
    peer: str
    remote: str
    """What lies at the other end: ``host``, ``cuda``, ``file``."""
    transport: str | None
    """The one in use; ``None`` before the first connection."""
    way: str
    """Directly, or through host memory, and at which end."""

    def __str__(self) -> str:
        arrow = "->" if self.write else "<-"
        ends = f"{self.local} {arrow} {self.remote} of {self.peer}"
        return f"{self.op}: {self.nbytes} bytes, {ends}: {self.way}"


class Rail(msgspec.Struct, frozen=True):
    """One NIC, or one transport within this host, as an engine may use it now."""

    transport: str
    device: str
    """The NIC; empty where there is none."""
    window: int
    """Bytes that may be under way over it at a time: less while other processes of this host have
    work for the same NIC."""
    under_way: int
    """Bytes that are under way over it, as far as they are limited."""


class Paths(msgspec.Struct, frozen=True):
    """The ways of all pieces of a batch."""

    pieces: tuple[Path, ...]

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.pieces)


class TransferEngine(_native.Engine):
    """Moves bytes between processes with one-sided writes, and counts them where they arrive.

    Every request returns a :class:`Transfer`, which can be awaited, waited for, polled, or given a
    callback. All methods may be called from any thread. Use as a context manager, or call
    :meth:`close`::

        async with TransferEngine() as engine:
            await engine.write(src, dst, imm=counter_ref)
    """

    config: EngineConfig
    closed: bool
    _readers: list[Callable[[], None]]

    def __new__(cls, config: EngineConfig | None = None, **overrides: Any) -> Self:
        """Opens an engine.

        Args:
            config: how to open it; see :class:`EngineConfig`.
            overrides: fields of :class:`EngineConfig` by name.

        Raises:
            InvalidArgument: an option that there isn't, or with a value that it can't have.
            TransportUnavailable: ``require`` can't be met here.
            ResourceError: the system refused something; the message says which limit to raise.
        """
        c = EngineConfig.resolve(config, overrides)
        self = super().__new__(cls, c)
        self.config = c
        self.closed = False
        self._readers = []
        _opened[id(self)] = self
        for tell in tuple(_on_open):
            tell(self)
        return self

    def register(self, obj: Any, *, segment: bool = False) -> Region:
        """Registers the memory behind a tensor, an array or any writable buffer.

        The region keeps the memory alive, and in place: what would move a registered tensor to
        other memory raises InvalidArgument, such as ``share_memory_()`` or a queue of
        torch.multiprocessing. A tensor that is given other memory (``data =``, ``set_``) leaves
        the region, which has what it had. Memory inside an allocation of this engine stays
        mappable for peers on this host. CUDA tensors register like any other; what a kernel has
        written must be waited for before it is sent.

        With ``segment``, all of the memory that a tensor is a view of is registered, once for all
        of its parts: a NIC pays for each registration and not for its length. On the host that is
        the tensor's storage, on a GPU the allocator's segment. The registration ends when the last
        part's region is gone, or when one is deregistered. Until then the parts' memory is kept,
        and a peer with one part's key can reach all of them.

        Raises:
            InvalidArgument: not contiguous, read-only, empty, or on a device that is neither the
                host nor a CUDA GPU.
        """
        addr, nbytes, keep = memory_of(obj)
        around = segment_of(obj, addr, nbytes) if segment else None
        return self._register(addr, nbytes, keep, around)

    def register_address(self, addr: int, nbytes: int, *, keep: Any = None) -> Region:
        """Registers ``nbytes`` bytes at an address of this process, on the host or on a GPU.

        For interfaces that have no object to give: the caller keeps the memory, and its pages
        readable and writable, until the registration has ended. Everything else is registered by
        :meth:`register`, which keeps it. ``keep`` is referred to for as long.

        Raises:
            InvalidArgument: address 0, no bytes, or past the end of the address space.
        """
        return self._register(addr, nbytes, keep)

    def empty(
        self, shape: tuple[int, ...] | int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Region]:
        """A zeroed torch tensor in memory that peers on this host can map, and its region.

        Raises:
            InvalidArgument: a size below 0, or ``dtype`` is none of torch's.
            ResourceError: no room; the message says where.
        """
        import torch

        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype: got {dtype!r}, expected one such as torch.float32")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in shape):
            raise InvalidArgument(f"a tensor of shape {shape} can't be: a size is negative")
        itemsize = torch.empty(0, dtype=dtype, device="cpu").element_size()
        count = math.prod(shape)
        region = self.alloc(max(1, count * itemsize))
        part = region if region.nbytes == count * itemsize else region[: count * itemsize]
        return part.tensor(dtype, shape), region

    async def messages(self, *, count: int = 16, max_nbytes: int = 65536) -> AsyncIterator[Message]:
        """Opens the receive pool, in place of the one before, and yields what arrives, at most
        ``count`` ahead of the reader.

        Ends when the engine is closed.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Message | None] = asyncio.Queue()

        def deliver(message: Message) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone, and its reader
                loop.call_soon_threadsafe(queue.put_nowait, message)

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(queue.put_nowait, None)

        self.receive(deliver, count=count, max_nbytes=max_nbytes)
        self._readers.append(end)
        if self.closed:  # by another thread, which may have looked for readers before
            end()
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._readers.remove(end)

    def close(self) -> None:
        """Ends everything: what is outstanding fails, peers see the engine as lost."""
        super().close()
        self.closed = True
        for end in list(self._readers):
            end()

    @overload
    def explain(self, what: Peer) -> Explanation: ...

    @overload
    def explain(self, what: Batch) -> Paths: ...

    def explain(self, what: Peer | Batch) -> Explanation | Paths:
        """Which transport leads to a peer, and why not the others; or the way of each piece of a
        batch."""
        if isinstance(what, Batch):
            return Paths(tuple(Path(*path) for path in self._paths(what)))
        name, transport, verdicts = self._explain(what)
        return Explanation(name, transport, tuple(Verdict(*v) for v in verdicts))

    def rails(self) -> tuple[Rail, ...]:
        """The ways out of this engine, in the order of its transports and NICs."""
        return tuple(Rail(*rail) for rail in self._rails())

    def metrics(self) -> EngineMetrics:
        """All that is counted: rails with durations by stage and class, peers with slices, bytes,
        repetitions, failures, exclusions and waits.

        Raises:
            ForkedEngine: it belongs to the parent process.
        """
        return metrics_of(self.config.name, self.id, self._metrics())

    def records(self, since: Cursor = (0, 0, 0, 0), *, oldest: int | None = None) -> EngineRecords:
        """The flight recorder's latest records, and the requests that are not over.

        Args:
            since: the cursor of an earlier answer; what it had is left out.
            oldest: of the transfers that are not over, so many at most; None for all.

        Raises:
            ForkedEngine: it belongs to the parent process.
        """
        return records_of(self.config.name, self.id, self._records(since), oldest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
