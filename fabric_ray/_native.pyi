"""The native core."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from fabric_ray.engine.config import EngineConfig
from fabric_ray.kvcache.errors import KvCause, KvEvent

__all__ = [
    "Batch",
    "CompletionQueue",
    "Counter",
    "CounterRef",
    "DeltaDecoder",
    "DeltaEncoder",
    "Digest",
    "Engine",
    "EngineAddress",
    "Flag",
    "KvDecoder",
    "KvPrefiller",
    "KvTimeline",
    "Message",
    "MoeExchange",
    "MoeThroughput",
    "Pages",
    "Peer",
    "PeerGroup",
    "PlanCore",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "Transfer",
    "Watcher",
    "__version__",
    "_one_of_each_error",
    "_span_variable",
    "bind_copies",
    "copy_rows",
    "digest_copies",
    "holders",
    "simulate",
    "span_of",
    "stretched_token",
    "survey",
    "topology",
]

__version__: str

_Priority: TypeAlias = Literal["latency", "bulk", "background"]
_Slice: TypeAlias = slice  # the classes below have a method of that name

# values that travel between processes

@final
class EngineAddress:
    """Where an engine can be reached, and which life of it.

    A value: it pickles, compares and hashes by what it says.
    """

    @property
    def id(self) -> str:
        """The engine's id as hex: drawn anew each time an engine opens."""
    @property
    def name(self) -> str:
        """The name its config gave it, for people and logs."""
    @property
    def transports(self) -> list[str]:
        """The transports it offers."""
    def to_bytes(self) -> bytes:
        """The encoded form: versioned, checksummed."""
    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decodes.

        Raises:
            DecodeError: anything but an intact encoding.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class RegionDescriptor:
    """A memory region, or part of one, as peers see it.

    A value: it pickles, compares and hashes by what it says.
    """

    @property
    def owner(self) -> EngineAddress:
        """The engine whose memory it is."""
    @property
    def nbytes(self) -> int:
        """Bytes."""
    def slice(self, offset: int, nbytes: int) -> RegionDescriptor:
        """A part of it: ``nbytes`` bytes from ``offset``.

        Raises:
            OutOfBounds: the part doesn't lie inside.
        """
    def to_bytes(self) -> bytes:
        """The encoded form: versioned, checksummed."""
    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decodes.

        Raises:
            DecodeError: anything but an intact encoding.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class SegmentDescriptor:
    """A segment as peers see it: one address space over many regions of one engine.

    A value: it pickles, compares and hashes by what it says.
    """

    @property
    def owner(self) -> EngineAddress:
        """The engine whose segment it is."""
    @property
    def nbytes(self) -> int:
        """Bytes, from offset 0 to the end of the last part."""
    @property
    def parts(self) -> list[tuple[int, int, str, list[str]]]:
        """Of each part: its offset, its bytes, where it lies (``host:0`` with its NUMA node,
        ``cuda:1``, ``file``), and the transports by which peers reach it."""
    def to_bytes(self) -> bytes:
        """The encoded form: versioned, checksummed."""
    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decodes.

        Raises:
            DecodeError: anything but an intact encoding.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class CounterRef:
    """A counter of some engine, for its writers.

    A value: it pickles, compares and hashes by what it says.
    """

    @property
    def owner(self) -> str:
        """The owning engine's id as hex."""
    def to_bytes(self) -> bytes:
        """The encoded form: versioned, checksummed."""
    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decodes.

        Raises:
            DecodeError: anything but an intact encoding.
        """
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

# memory

@disjoint_base
class Region:
    """A registered memory region of this engine, or a part of one.

    Keeps the memory alive; when the last view is gone, the registration ends.
    """

    @property
    def nbytes(self) -> int:
        """Bytes."""
    @property
    def addr(self) -> int:
        """Address of the first byte in this process.

        Raises:
            InvalidArgument: a file region; it has none.
        """
    @property
    def path(self) -> Path | None:
        """The file that it lies in; ``None`` for memory."""
    @property
    def mappable(self) -> bool:
        """Whether peers on this host can map it: memory that the engine allocated."""
    @property
    def cuda_device(self) -> int | None:
        """The GPU that the memory is part of, as this process numbers it; ``None`` on the host."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def slice(self, offset: int, nbytes: int) -> Region:
        """A part of it: ``nbytes`` bytes from ``offset``. Same registration, own bounds.

        Raises:
            OutOfBounds: the part doesn't lie inside.
        """
    def grant(
        self,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        peer: Peer | EngineAddress | str | None = None,
        ttl: float | None = None,
    ) -> Region:
        """A part of it as a registration of its own, under a key that reaches nothing beside it.

        It ends with its last view, when it or this region is revoked, or by itself after ``ttl``;
        its descriptor is ``Stale`` from then on. Revoking this region is over when all grants from
        it are; dropping this region leaves them as they are.

        Args:
            offset: bytes from the start of this region.
            nbytes: bytes; all from ``offset`` on if not named.
            peer: the one engine that may use it: a peer, its address, or its id as hex. tcp, shm
                and staging refuse other engines; a NIC knows keys only, and refuses none.
            ttl: seconds until it ends by itself.

        Raises:
            OutOfBounds: the part doesn't lie inside.
            InvalidArgument: no bytes, no time, no engine's id, or a region of a file.
            Stale: the region has ended.
        """
    def descriptor(self) -> RegionDescriptor:
        """What a peer needs to write here."""
    def sync(self) -> None:
        """Returns when what was written to a file region is on its disk, and not only in the page
        cache; at once for memory.

        Raises:
            ResourceError: the disk refused; the message names the file.
        """
    def deregister(self, timeout: float = 10.0) -> None:
        """Ends the registration for all views and waits until no peer can reach the memory.

        Args:
            timeout: seconds.

        Raises:
            NotQuiesced: it can't be shown in time; the engine keeps the memory.
        """
    def revoke(self) -> Transfer:
        """Ends the registration for all views, without waiting.

        Peers that use the descriptor from now on fail with ``Stale``. The transfer is done when no
        byte of a peer can land any more and no transfer of this engine uses the memory: then it may
        be reused.
        """
    def numpy(self) -> NDArray[np.uint8]:
        """The memory as a flat array of bytes; it keeps the region."""
    def tensor(
        self, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The memory as a torch tensor of ``dtype`` (bytes if not named) and ``shape`` (flat if not
        named); it keeps the region."""
    def __len__(self, /) -> int: ...
    def __getitem__(self, part: _Slice, /) -> Region:
        """``region[a:b]``: the bytes from ``a`` to ``b``."""

@final
class RemoteRegion:
    """A peer's region, ready to be named in requests."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
    @property
    def peer(self) -> Peer:
        """The engine whose memory it is."""
    def slice(self, offset: int, nbytes: int) -> RemoteRegion:
        """A part of it: ``nbytes`` bytes from ``offset``.

        Raises:
            OutOfBounds: the part doesn't lie inside.
        """
    def __len__(self, /) -> int: ...
    def __getitem__(self, part: _Slice, /) -> RemoteRegion:
        """``region[a:b]``: the bytes from ``a`` to ``b``."""

@final
class Segment:
    """One address space over regions of this engine: host memory, GPU memory and files alike.

    Made by `TransferEngine.segment`. Keeps its regions.
    """

    @property
    def nbytes(self) -> int:
        """Bytes, from offset 0 to the end of the last part."""
    @property
    def regions(self) -> list[Region]:
        """The parts' regions, in order."""
    def descriptor(self) -> SegmentDescriptor:
        """What a peer needs to open it."""
    def __len__(self, /) -> int: ...

@final
class RemoteSegment:
    """A peer's segment, ready to be named in requests."""

    @property
    def nbytes(self) -> int:
        """Bytes, from offset 0 to the end of the last part."""
    @property
    def peer(self) -> Peer:
        """The engine whose segment it is."""
    def __len__(self, /) -> int: ...

@final
class Pages:
    """Which pages of a region, in order: page ``i`` lies at ``offset + indices[i] * stride`` bytes.

    Made by :func:`fabric_ray.pages`.
    """

    @property
    def stride(self) -> int:
        """Bytes between neighbouring page numbers."""
    @property
    def offset(self) -> int:
        """Bytes before page 0."""
    @staticmethod
    def _listed(indices: bytes, stride: int, offset: int) -> Pages: ...
    @staticmethod
    def _range(first: int, count: int, stride: int, offset: int) -> Pages: ...
    def __len__(self, /) -> int: ...

# peers

@final
class Peer:
    """Another engine, as this one knows it. Equal if the engine is the same life of it."""

    @property
    def address(self) -> EngineAddress:
        """Where it can be reached."""
    @property
    def id(self) -> str:
        """The peer's id as hex."""
    @property
    def name(self) -> str:
        """The name its config gave it."""
    @property
    def label(self) -> str:
        """What errors call it (``peer`` of a :class:`PeerError`): its name and the start of its
        id."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class PeerGroup:
    """Peers that are addressed together."""

    @property
    def peers(self) -> list[Peer]:
        """In the order they were given."""
    def __len__(self, /) -> int: ...

@final
class Message:
    """A small message from a peer. It holds its place in the receive pool until it is dropped."""

    @property
    def sender(self) -> str:
        """The sending engine's id, as hex."""
    @property
    def data(self) -> bytes:
        """A copy of its bytes."""

# completion

@final
class Transfer:
    """The future of one request or expectation: wait for it, await it, poll it, hang a callback on
    it.

    Dropping it cancels nothing.
    """

    @property
    def op(self) -> str:
        """What was asked for: ``write``, ``read``, ``expectation``, ..."""
    @property
    def transport(self) -> str | None:
        """The transport in use towards its peer when it was submitted; ``None`` before the first
        connection, for batches over several peers, and for expectations."""
    def wait(self, timeout: float | None = None) -> None:
        """Blocks until it is over.

        Args:
            timeout: seconds; ``None`` leaves it to the transfer's own deadline.

        Raises:
            FabricError: what it failed with.
            TimeoutError: it is not over in time; it goes on.
        """
    def done(self) -> bool:
        """Whether it is over, whatever the result. Moves the engine on for a moment."""
    def result(self) -> None:
        """Returns if it succeeded.

        Raises:
            FabricError: what it failed with.
            RuntimeError: it is not over.
        """
    def exception(self) -> Exception | None:
        """What it failed with, or ``None``."""
    def add_done_callback(self, callback: Callable[[Transfer], object]) -> None:
        """Calls ``callback(self)`` on the engine's callback thread when it is over, at once if it
        is."""
    def cancel(self) -> None:
        """Ends it with :class:`Cancelled` unless it is over.

        What was not posted never will be. What is under way may still land: reuse its buffers, on
        both sides, once :attr:`quiesced` is true.
        """
    @property
    def quiesced(self) -> bool | None:
        """Whether nothing of it can land any more, nor touch its buffers.

        ``None`` if that can't be known: a link that carried some of it was lost, and its other
        end did not confirm that it is down.
        """
    def wait_quiesced(self, timeout: float | None = None) -> bool | None:
        """Waits until :attr:`quiesced`, at most so many seconds, and returns it."""
    def flag(self, device: int | None = None) -> Flag:
        """For loops that poll: true once the transfer is over.

        Args:
            device: a GPU whose kernels wait for it as well.

        Raises:
            ResourceError: there is no such GPU here.
        """
    def _spin(self, microseconds: int) -> bool: ...
    def _notify(self, queue: CompletionQueue, key: int) -> None: ...
    def __await__(self) -> Generator[Any]: ...

@final
class Flag:
    """True once a transfer is over, whatever the result."""

    def __bool__(self, /) -> bool: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

@final
class Counter:
    """Counts logical writes that name it: one per write, per page, per scatter destination."""

    @property
    def ref(self) -> CounterRef:
        """The counter as writers name it."""
    @property
    def value(self) -> int:
        """Writes counted so far."""
    @property
    def unclaimed(self) -> int:
        """Writes counted that no expectation has taken."""
    def poll(self) -> int:
        """Moves the engine on for a moment, then returns the value: for loops that spin.

        Raises:
            ForkedEngine: in a child by fork, as all that would make progress does there.
        """
    def expect(
        self,
        n: int = 1,
        *,
        writers: Sequence[Peer] | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Done when the next ``n`` writes that no earlier expectation takes have been counted;
        those that came before count.

        Args:
            writers: the peers that are to write; if one is lost first, the expectation fails with
                `PeerLost`. Without names only ``timeout`` ends a wait in vain.
            timeout: seconds; by default the engine's ``op_timeout``.
        """
    def wait(
        self,
        n: int = 1,
        *,
        writers: Sequence[Peer] | None = None,
        timeout: float | None = None,
    ) -> None:
        """``expect(n)`` and wait for it.

        Raises:
            TransferTimeout: the writes did not come in time.
            PeerLost: a writer was lost first.
        """

@final
class CompletionQueue:
    """Completions for an event loop: a descriptor that becomes readable, and the keys of what is
    over."""

    def __new__(cls) -> Self: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[int]:
        """The keys of what is over since the last call."""

@final
class Watcher:
    """A 64-bit word that the engine watches: it calls back with the old and the new value."""

    @property
    def addr(self) -> int:
        """Address of the word: 8 bytes, aligned. From the first use of it, or of an array of the
        word, the engine polls the word."""
    @property
    def value(self) -> int:
        """What the word holds now."""
    @property
    def seen(self) -> tuple[int, float]:
        """The value that the watching thread saw last, and how many seconds ago: at that moment it
        began with the callback."""
    @property
    def home(self) -> str:
        """Where the word lies: ``host memory``, ``pinned host memory``, or GPU memory."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def store(self, value: int) -> None:
        """Changes the word and wakes the watching thread."""
    def add(self, n: int = 1) -> None:
        """Adds to the word and wakes the watching thread."""

# requests

@final
class Batch:
    """A request of several operations, which may mix kinds and peers.

    Build it once, submit it as often as needed: what can be prepared is prepared here. The methods
    take what those of the engine take. Bytes outside a region are found by `submit`, which names
    the operation and sends nothing.
    """

    def __new__(cls) -> Self: ...
    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        nbytes: int | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: CounterRef | int | None = None,
    ) -> None:
        """Adds a write; see `TransferEngine.write`."""
    def read(
        self,
        src: RemoteRegion,
        dst: Region,
        nbytes: int | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
    ) -> None:
        """Adds a read; see `TransferEngine.read`."""
    def write_pages(
        self,
        page_nbytes: int,
        src: Region,
        src_pages: Pages,
        dst: RemoteRegion,
        dst_pages: Pages,
        *,
        imm: CounterRef | int | None = None,
    ) -> None:
        """Adds a paged write; see `TransferEngine.write_pages`."""
    def read_pages(
        self,
        page_nbytes: int,
        src: RemoteRegion,
        src_pages: Pages,
        dst: Region,
        dst_pages: Pages,
    ) -> None:
        """Adds a paged read; see `TransferEngine.read_pages`."""
    def write_segment(
        self,
        local: Segment,
        local_offset: int,
        remote: RemoteSegment,
        remote_offset: int,
        nbytes: int,
        *,
        imm: CounterRef | int | None = None,
    ) -> None:
        """Adds a write from a range of a segment to a range of a peer's.

        Both ranges may cross the borders of parts. With ``imm``, the receiver's counter counts 1,
        when all of it is in place.

        Raises:
            OutOfBounds: the range passes the end of a segment.
            InvalidArgument: it touches a gap between parts, or is empty.
        """
    def read_segment(
        self,
        local: Segment,
        local_offset: int,
        remote: RemoteSegment,
        remote_offset: int,
        nbytes: int,
    ) -> None:
        """Adds a read of a range of a peer's segment into a range of one; as `write_segment`."""
    def scatter(
        self,
        src: Region,
        parts: Sequence[tuple[RemoteRegion, int, int, int]],
        *,
        group: PeerGroup | None = None,
        imm: CounterRef | int | None = None,
    ) -> None:
        """Adds a scatter; see `TransferEngine.scatter`."""
    def barrier(self, group: PeerGroup, imm: int) -> None:
        """Adds a barrier; see `TransferEngine.barrier`."""
    def send(self, peer: Peer, message: bytes) -> None:
        """Adds a message; see `TransferEngine.send`."""
    def __len__(self, /) -> int: ...

class _Stats(TypedDict):
    counted: int
    ghosts: int
    regions: int
    retiring: int

@disjoint_base
class Engine:
    """The native engine; `fabric_ray.TransferEngine` is the class to use."""

    def __new__(cls, config: EngineConfig) -> Self: ...
    @property
    def address(self) -> EngineAddress:
        """To be sent to peers."""
    @property
    def id(self) -> str:
        """This engine's id as hex: drawn anew each time one opens."""
    def alloc(self, nbytes: int) -> Region:
        """``nbytes`` bytes of memory that peers on this host can map, zeroed; 1 at least.

        Raises:
            ResourceError: no room; the message says where.
        """
    def _register(
        self, addr: int, nbytes: int, keep: object, segment: tuple[int, int] | None = None
    ) -> Region: ...
    def register_file(
        self,
        path: str | PathLike[str],
        *,
        nbytes: int | None = None,
        offset: int = 0,
        create: bool = False,
        writable: bool = True,
    ) -> Region:
        """Makes a file, or a part of one, a region that peers and this engine write to and read
        from with the same requests as memory.

        It has no address and is never mapped. Between it and this engine's own memory go requests
        to the engine itself: ``engine.import_region(region.descriptor())``.

        Args:
            nbytes: the region's bytes; by default the rest of the file.
            offset: where the region begins in the file.
            create: make the file if there is none, and lengthen it to the region's end. The new
                bytes are zeroes that take no room until they are written, but for the last
                block.
            writable: false to open it for reading only.

        Raises:
            InvalidArgument: neither a file nor a disk, or shorter than the region.
            ResourceError: the system refused to open or to lengthen it.
        """
    def segment(self, parts: Sequence[Region | tuple[int, Region]]) -> Segment:
        """One address space over regions: each after the one before it, or at its own offset.

        Raises:
            InvalidArgument: no part, parts that are out of order or overlap, another engine's, or
                a descriptor above 1 MiB.
        """
    def open_segment(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """A peer's segment, or one of this engine's own, to be named in requests."""
    def peer(self, address: EngineAddress) -> Peer:
        """Makes a peer known; the first use connects."""
    def import_region(self, descriptor: RegionDescriptor) -> RemoteRegion:
        """A peer's region, to be named in requests."""
    def peer_group(self, peers: Sequence[Peer]) -> PeerGroup:
        """Peers to address together; connects to all of them now."""
    def connect(self, peer: Peer) -> None:
        """Begins to connect, so that the first transfer doesn't have to."""
    def counter(self) -> Counter:
        """A counter that no other code uses."""
    def plain_counter(self, value: int) -> Counter:
        """The counter behind a pre-agreed integer below 2^19."""
    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        nbytes: int | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: CounterRef | int | None = None,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Writes ``nbytes`` bytes of ``src`` to ``dst``.

        Args:
            nbytes: without it, all of both, which must be equally long.
            src_offset: bytes from the start of ``src``.
            dst_offset: bytes from the start of ``dst``.
            imm: a counter of the receiver, or a pre-agreed integer below 2^19: counts 1 there when
                the bytes are readable.
            timeout: seconds until it fails; by default the engine's ``op_timeout``.
            rail: the one NIC that may carry it, counted from 0 among those of the transport in
                use; by default the load is spread over all of them.
            priority: ``latency`` where a caller waits, ``bulk`` (the default), or ``background``.
                Requests leave room on their rail for more urgent ones; none starves.

        Raises:
            OutOfBounds: bytes outside ``src`` or ``dst``; nothing was sent.
            InvalidArgument: no bytes, or the counter of another peer; nothing was sent.
        """
    def read(
        self,
        src: RemoteRegion,
        dst: Region,
        nbytes: int | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Reads ``nbytes`` bytes of the peer's ``src`` into ``dst``; arguments as for
        :meth:`write`."""
    def write_pages(
        self,
        page_nbytes: int,
        src: Region,
        src_pages: Pages,
        dst: RemoteRegion,
        dst_pages: Pages,
        *,
        imm: CounterRef | int | None = None,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Writes pages of ``page_nbytes`` bytes: page ``i`` of ``src_pages`` to page ``i`` of
        ``dst_pages``.

        Args:
            imm: counts 1 at the receiver for each page.
            timeout: seconds until it fails; by default the engine's ``op_timeout``.

        Raises:
            OutOfBounds: a page outside ``src`` or ``dst``; nothing was sent.
            InvalidArgument: not as many pages on both sides; nothing was sent.
        """
    def read_pages(
        self,
        page_nbytes: int,
        src: RemoteRegion,
        src_pages: Pages,
        dst: Region,
        dst_pages: Pages,
        *,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Reads pages: page ``i`` of the peer's ``src_pages`` into page ``i`` of ``dst_pages``."""
    def scatter(
        self,
        src: Region,
        parts: Sequence[tuple[RemoteRegion, int, int, int]],
        *,
        group: PeerGroup | None = None,
        imm: CounterRef | int | None = None,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Writes a part of ``src`` to each of several peers.

        Args:
            parts: ``(dst, dst_offset, src_offset, nbytes)``, all in bytes.
            group: if given, part ``i`` must belong to its peer ``i``.
            imm: counts 1 at each receiver: a pre-agreed integer where there are several, for a
                reference is good for its engine alone.
            timeout: seconds until it fails; by default the engine's ``op_timeout``.

        Raises:
            OutOfBounds: a part outside ``src`` or its ``dst``; nothing was sent.
        """
    def barrier(self, group: PeerGroup, imm: int, *, timeout: float | None = None) -> Transfer:
        """An immediate, and nothing else, to every peer of the group."""
    def send(self, peer: Peer, message: bytes, *, timeout: float | None = None) -> Transfer:
        """Sends a small message to the peer's receive pool; done when the pool has taken it."""
    def submit(
        self,
        batch: Batch,
        *,
        imm: CounterRef | int | None = None,
        timeout: float | None = None,
        rail: int | None = None,
        priority: _Priority | None = None,
    ) -> Transfer:
        """Submits a batch: one transfer, done when all its operations are.

        May be called again and again with the same batch; ``imm`` stands in for the immediates of
        its writes this time.
        """
    def prepare(self, batch: Batch, *, timeout: float | None = None) -> Transfer:
        """Makes everything ready that the writes of a batch will need: connections, keys, mappings.

        The first of many pushes over the same ranges is then as quick as the others. No byte moves
        and nothing is counted.
        """
    def receive(
        self,
        callback: Callable[[Message], object],
        *,
        count: int = 16,
        max_nbytes: int = 65536,
    ) -> None:
        """Opens the receive pool, in place of the one before: ``callback(message)`` is called for
        each message.

        Args:
            count: messages alive at a time; further ones wait at their senders until one is
                dropped.
            max_nbytes: bytes of the longest message; transports carry 64 KiB at most.
        """
    def watch(self, callback: Callable[[int, int], object], device: int | None = None) -> Watcher:
        """A 64-bit word that the engine watches: ``callback(old, new)`` runs when it has changed.

        Args:
            device: a GPU whose kernels write and read it as well: in its memory where GDRCopy is
                installed, else in pinned host memory.

        Raises:
            ResourceError: there is no such GPU here.
        """
    def _explain(self, peer: Peer) -> tuple[str, str | None, list[tuple[str, str, bool, str]]]: ...
    def _paths(
        self, batch: Batch
    ) -> list[tuple[int, bool, int, str, str, str, str | None, str]]: ...
    def _rails(self) -> list[tuple[str, str, int, int]]: ...
    def stats(self) -> _Stats:
        """Counts since the engine was opened: writes ``counted``, ``ghosts`` (immediates of an
        earlier use, not counted), ``regions`` registered now, and those ``retiring``."""
    def _metrics(self) -> dict[str, Any]: ...
    def _records(self, since: tuple[int, int, int, int]) -> dict[str, Any]: ...
    def drain(self) -> Transfer:
        """Takes nothing new from now on: requests and expectations raise ``EngineClosed``. The
        transfer is done when all that was begun here is over, by its deadline at the latest; then
        ``close()``. Peers can write until then.
        """
    def close(self) -> None:
        """Ends everything: outstanding transfers fail with `EngineClosed`, peers see this engine
        as lost. May be called more than once: beside another call it returns when that is over, in
        a callback at once."""

# weights

@final
class Digest:
    """A digest of pages that is the same on both sides of a transfer: a sum, over pages, of the
    xxh3 of the page's bytes seeded with its place at the receiver. Order and grouping don't
    matter."""

    def __new__(cls) -> Self: ...
    def add(self, page_nbytes: int, region: Region, pages: Pages, places: Pages) -> None:
        """Adds pages of ``page_nbytes`` bytes of ``region``; ``places`` are the same pages at the
        receiver."""
    def compute(self) -> int:
        """The digest of the bytes as they are now."""

@final
class DeltaEncoder:
    """The bytes of copies as of the version before, and the encoding of what changed since.

    Args:
        copies: their source sides are read.
        itemsizes: bytes of an element, for each copy.
    """

    def __new__(cls, copies: Sequence[_PlanCopy], itemsizes: Sequence[int]) -> Self: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
    def encode(
        self,
        first: int,
        last: int,
        sources: Mapping[int, tuple[Region, int]],
        outbox: Region,
        at: int,
        compare: bool,
        share: int,
        threads: int,
    ) -> list[tuple[int, int, int]]:
        """Encodes the copies ``first`` to ``last``, and keeps their bytes as the version before.

        Args:
            sources: the region of each source container, and the container's offset in it, bytes.
            outbox: takes the encodings, from byte ``at`` on.
            compare: whether to encode anything.
            share: an encoding takes at most 1/share of the copy's bytes.
            threads: how many to use.

        Returns:
            For each copy offset and length of its encoding, and the digest of its bytes; a length
            of 0 for a copy that has to be sent whole.

        Raises:
            InvalidArgument: a container has no region.
            OutOfBounds: a copy reads past the end of a source region.
        """

@final
class DeltaDecoder:
    """Applies what a :class:`DeltaEncoder` has encoded of the same copies.

    Args:
        copies: their target sides are written.
        itemsizes: bytes of an element, for each copy.
        offsets: of each target container in its region, bytes; -1 where there is none.

    Raises:
        InvalidArgument: a copy's container has no offset.
    """

    def __new__(
        cls, copies: Sequence[_PlanCopy], itemsizes: Sequence[int], offsets: Sequence[int]
    ) -> Self: ...
    def apply(
        self,
        which: Sequence[int],
        inbox: Region,
        at: int,
        nbytes: int,
        base: Region,
        target: Region,
        threads: int,
    ) -> int | None:
        """Makes the bytes of copies from those of the version before.

        Args:
            which: the copies whose encodings the inbox has, in order.
            inbox: has ``nbytes`` bytes of encodings from byte ``at`` on.
            base: has the version before.
            target: takes the bytes; ``base`` itself to change them in place.
            threads: how many to use.

        Returns:
            The sum of the encoder's digests if the bytes are the same; ``None`` if the encoding is
            none of these copies. ``target`` may be changed in part then.

        Raises:
            OutOfBounds: a copy writes past the end of a region.
        """

# plan

_PlanColumns: TypeAlias = tuple[
    tuple[bytes, bytes], tuple[bytes, bytes, bytes, bytes], bytes, bytes
]
_RankBytes: TypeAlias = list[tuple[int, int]]

@final
class PlanCore:
    """What `fabric_ray.plan.Plan` wraps: layouts in as MessagePack, copies out as columns of
    numbers."""

    @staticmethod
    def build(
        source: bytes, target: bytes, ignore_extra: bool, min_split_bytes: int
    ) -> PlanCore: ...
    @staticmethod
    def from_bytes(data: bytes) -> PlanCore: ...
    def to_bytes(self) -> bytes: ...
    def digest(self) -> int: ...
    def ranks(self, side: str) -> list[int]: ...
    def containers(self, side: str) -> list[tuple[str, str]]:
        """``(name, dtype)`` of each container."""
    def local_containers(self, side: str, rank: int) -> list[tuple[int, list[int], list[int], int]]:
        """``(index, shape, strides in bytes, bytes)`` of each container that a rank has."""
    def links(self) -> list[tuple[int, int, int, int, int]]:
        """``(source, target, bytes, pages, copies)`` per pair of ranks that exchange anything."""
    def bytes_on_link(self, src: int, dst: int) -> int: ...
    def expected_pages(self, dst: int) -> int: ...
    def counts(self) -> tuple[int, int]: ...
    def balance(self) -> tuple[int, _RankBytes, _RankBytes, tuple[float, float, float]]:
        """Total, bytes sent and received per rank, and the three imbalances."""
    def for_source(self, rank: int) -> _PlanColumns: ...
    def for_target(self, rank: int) -> _PlanColumns: ...
    def sending_order(self, rank: int) -> list[int]: ...
    def explain(self, name: str | None = None, rank: int | None = None) -> str: ...
    def equals(self, other: PlanCore) -> bool: ...

def holders(target: bytes) -> tuple[list[list[int]], list[list[int]]]:
    """What `fabric_ray.plan.replicas` gives types to."""

# simulate

def simulate(
    plan: PlanCore,
    steps: Sequence[Sequence[tuple[list[int], tuple[int, int, int, int], int, int, int]]],
    network: dict[str, float],
) -> dict[str, Any]:
    """What `fabric_ray.weights.simulation` gives types to.

    Args:
        steps: by source rank, in their order: containers, nanoseconds of the stages, bytes of
            temporary memory, how many steps must have been sent before, mesh group.
        network: NICs of a rank, their rate in bytes a nanosecond, nanoseconds of latency, of a
            submitting call and of each request; bytes of a page.

    Raises:
        InvalidArgument: sizes that mean nothing.
    """

# kvcache

_KvRank: TypeAlias = tuple[int, Engine, Sequence[Region], Region | None]
_KvTerms: TypeAlias = tuple[float, float, int, int, int]

@final
class KvDecoder:
    """The native half of `fabric_ray.kvcache.Decoder`."""

    def __new__(
        cls,
        *,
        name: str,
        layouts: Sequence[bytes],
        ranks: Sequence[_KvRank],
        terms: _KvTerms,
        on_event: Callable[[int, KvEvent, KvCause, str], object],
    ) -> Self: ...
    def connect(self, offer: bytes) -> int: ...
    def request(
        self,
        prefiller: int,
        *,
        tokens: int,
        have: int,
        salt: int,
        tables: Sequence[Sequence[int]],
        tail_slot: int,
        payload: bytes,
        timeout: float,
    ) -> int: ...
    def cancel(self, request: int) -> bool: ...
    def renew(self, prefiller: int, leases: Sequence[int]) -> None: ...
    def disconnect(self, prefiller: int) -> None: ...
    def is_connected(self, prefiller: int) -> bool: ...
    @property
    def open(self) -> int: ...
    def close(self) -> None: ...

@final
class KvTimeline:
    """The native half of `fabric_ray.kvcache.Job.timeline`."""

    def layers(self) -> list[tuple[int, int | None, int | None, int | None]]: ...

@final
class KvPrefiller:
    """The native half of `fabric_ray.kvcache.Prefiller`."""

    def __new__(
        cls,
        *,
        name: str,
        layouts: Sequence[bytes],
        ranks: Sequence[_KvRank],
        terms: _KvTerms,
        on_event: Callable[[int, KvEvent, KvCause, str], object],
        on_request: Callable[[int, str, int, int, bytes, KvTimeline], object],
        on_renewal: Callable[[list[int]], object],
        device: int | None = None,
    ) -> Self: ...
    def offer(self) -> bytes: ...
    @property
    def word(self) -> Watcher: ...
    def layer_done(self) -> None: ...
    @property
    def layers(self) -> int: ...
    def accept(self, job: int, tables: Sequence[Sequence[int]], computed: int) -> None: ...
    def begin(self, requests: Sequence[tuple[int, int]], counted: int | None = None) -> None: ...
    def finish(self, job: int, slot: int) -> None: ...
    def fail(self, job: int, why: str) -> None: ...
    def refuse(self, job: int, reason: Literal["busy", "too_long"], why: str) -> None: ...
    @property
    def jobs(self) -> int: ...
    @property
    def decoders(self) -> int: ...
    def close(self) -> None: ...

# moe

_MoePart: TypeAlias = tuple[int, int, int, int]

@final
class MoeExchange:
    """The native half of `fabric_ray.moe.AllToAll`."""

    def __new__(
        cls,
        engine: Engine,
        *,
        rank: int,
        ranks: int,
        experts: int,
        topk: int,
        max_tokens: int,
        row_nbytes: int,
        elements: int,
        dtype: str,
        private_rows: int,
        shared_rows: int | None,
        allocate: Callable[[int], Region] | None = None,
    ) -> Self: ...
    @property
    def areas(self) -> list[tuple[str, str, int]]: ...
    @property
    def own_rows(self) -> tuple[int, int, int]: ...
    @property
    def device_words(self) -> int: ...
    @property
    def device_areas(self) -> list[tuple[str, int, int]]: ...
    @property
    def device_turns(self) -> tuple[int, int]: ...
    @property
    def ways(self) -> list[tuple[int, str]]: ...
    def serve(
        self, fifo: tuple[int, int, int, int], words: int, keep: object, stores: bool
    ) -> None: ...
    def check(self) -> None: ...
    def leave(self) -> None: ...
    def expect_departures(self) -> None: ...
    def finish(self) -> None: ...
    def settled(self) -> None: ...
    @property
    def begins(self) -> bool: ...
    @property
    def left_out(self) -> list[int]: ...
    def descriptor(self, only: int | None = None) -> bytes: ...
    def admit(self, descriptor: bytes) -> int: ...
    def set_timeout(self, seconds: float) -> None: ...
    def mask(self, rank: int, cause: str) -> None: ...
    def disconnect(self) -> None: ...
    @property
    def between_exchanges(self) -> bool: ...
    @property
    def given_up_by(self) -> list[int]: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def lost(self) -> list[tuple[int, str, str]]: ...
    @property
    def present(self) -> list[bool]: ...
    def dispatch_send(self, parts: Sequence[_MoePart], indices: tuple[int, int]) -> None: ...
    def arriving(
        self, *, multiple: int, stride: int | None
    ) -> tuple[list[int], list[int], int]: ...
    def arriving_on_device(self, ticket: int, seconds: float) -> list[int] | None: ...
    def dispatch_recv(self, parts: Sequence[_MoePart]) -> None: ...
    def combine_send(self, answers: _MoePart) -> None: ...
    def combine_answers(self, out: _MoePart) -> None: ...
    def combine_recv(self, weights: _MoePart | None, out: _MoePart, dtype: str) -> list[int]: ...
    @property
    def wait_times(self) -> list[int]: ...

@final
class MoeThroughput:
    """The native half of `fabric_ray.moe.ThroughputAllToAll`."""

    def __new__(
        cls,
        engine: Engine,
        *,
        rank: int,
        ranks: int,
        ranks_per_node: int,
        experts: int,
        topk: int,
        max_tokens: int,
        row_nbytes: int,
        elements: int,
        dtype: str,
        channels: int,
        chunk: int,
        ring_chunks: int,
        threads: int,
        timeout: float,
        incarnation: int = 0,
        kernels: tuple[int, Callable[[int, int], tuple[Region, int, object]]] | None = None,
    ) -> Self: ...
    @property
    def areas(self) -> list[tuple[str, str, int]]: ...
    def descriptor(self) -> bytes: ...
    def admit(self, descriptor: bytes) -> int: ...
    def set_timeout(self, seconds: float) -> None: ...
    def leave_out(self, rank: int) -> None: ...
    def mask(self, rank: int, cause: str) -> None: ...
    def expect_departures(self) -> None: ...
    @property
    def broken(self) -> tuple[int, str] | None: ...
    @property
    def lost(self) -> list[tuple[int, str]]: ...
    @property
    def present(self) -> list[bool]: ...
    @property
    def left_out(self) -> list[int]: ...
    @property
    def traffic(self) -> tuple[int, int, int, int]: ...
    def dispatch_send(
        self,
        parts: Sequence[_MoePart],
        indices: tuple[int, int],
        weights: _MoePart | None,
    ) -> None: ...
    def arriving(
        self, *, multiple: int, stride: int | None
    ) -> tuple[list[int], list[int], int]: ...
    def dispatch_recv(self, parts: Sequence[_MoePart]) -> None: ...
    def combine_send(self, answers: _MoePart) -> None: ...
    def combine_recv(self, out: _MoePart, dtype: str) -> None: ...
    def work_form(self, workers: int) -> tuple[int, int, int, int, int]: ...
    def begin_work(self) -> int: ...
    def end_work(self, call: int) -> None: ...
    def kernel_dispatch_send(self, indices: tuple[int, int], weights: _MoePart | None) -> None: ...
    def kernel_dispatch_recv(self, rows: int) -> None: ...
    def kernel_combine_send(self, rows: int) -> None: ...
    def kernel_combine_recv(self) -> int: ...

# observe

def _one_of_each_error() -> list[Exception]: ...
def _span_variable() -> ContextVar[int]: ...
def span_of(name: str) -> int:
    """The span of a name, the same in every process: 64-bit FNV-1a of its UTF-8."""

# a plan's copies on regions

class _CopyLoop(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def src_stride(self) -> int: ...
    @property
    def dst_stride(self) -> int: ...

class _PlanCopy(Protocol):
    """A :class:`fabric_ray.plan.Copy`."""

    @property
    def src_container(self) -> int: ...
    @property
    def src_offset(self) -> int: ...
    @property
    def dst_container(self) -> int: ...
    @property
    def dst_offset(self) -> int: ...
    @property
    def run(self) -> int: ...
    @property
    def loops(self) -> Sequence[_CopyLoop]: ...

def copy_rows(copy: _PlanCopy) -> list[tuple[int, int, int, int, int]]:
    """``(runs, source offset, source stride, target offset, target stride)`` of each row."""

def bind_copies(
    copies: Sequence[_PlanCopy],
    sources: Mapping[int, tuple[Region, int]],
    target: RemoteRegion,
    offsets: Sequence[int],
) -> tuple[Batch, Digest]:
    """The batch that sends copies to one target, and the digest of its bytes.

    Args:
        copies: all to the same target rank.
        sources: the region of each source container, and the container's offset in it, bytes.
        target: the target's region.
        offsets: of each target container in ``target``, bytes; -1 where the target has none.

    Raises:
        InvalidArgument: a container has no region.
        OutOfBounds: a copy reads past the end of a source region.
    """

def digest_copies(copies: Sequence[_PlanCopy], target: Region, offsets: Sequence[int]) -> Digest:
    """The receiver's digest of the bytes of copies."""

# the token

def stretched_token(token: bytes) -> bytes:
    """The key that handshakes use in place of a token: Argon2id, once per process and token."""

# doctor

def survey(names: Sequence[str], provider: str | None = None) -> dict[str, Any]:
    """What `fabric_ray.doctor.devices.survey` gives types to."""

# topology

def topology(root: str, rules: str | None = None) -> dict[str, Any]:
    """What `fabric_ray.topology.read` gives types to.

    Raises:
        InvalidArgument: ``root`` is no sysfs tree, or a rule matches nothing there.
    """
