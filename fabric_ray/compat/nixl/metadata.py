"""What agents know of one another: bytes that travel by whatever way their users have."""

from __future__ import annotations

import functools
import threading

import msgspec

from fabric_ray.compat.addresses import AddressSpace
from fabric_ray.compat.nixl.status import nixlMismatchError, nixlNotFoundError
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import EngineAddress, Peer, RegionDescriptor, RemoteRegion, TransferEngine
from fabric_ray.errors import DecodeError

_MAGIC = b"fabric-ray/nixl"
_VERSION = 1


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """A range that an agent has registered."""

    first: int
    nbytes: int
    descriptor: bytes


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """An agent, for others to load."""

    magic: bytes
    version: int
    name: str
    address: bytes
    """The engine's; empty in a part that only adds memory."""
    whole: bool
    """Whether this is all that the agent has; a part adds to what is known."""
    memory: list[Memory]
    changes: int = 0
    """Registrations and their ends before: of two that are whole, the newer has more."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def of(
        cls, name: str, address: bytes, whole: bool, memory: list[Memory], changes: int
    ) -> Metadata:
        return cls(_MAGIC, _VERSION, name, address, whole, memory, changes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Metadata:
        """
        Raises:
            nixlMismatchError: anything but metadata of this version.
        """
        try:
            found = from_msgpack(data, cls)
        except msgspec.MsgspecError as error:
            raise nixlMismatchError(
                f"not an agent's metadata ({error}); both ends must be fabric-ray's"
            ) from error
        if (found.magic, found.version) != (_MAGIC, _VERSION):
            raise nixlMismatchError(
                f"an agent's metadata of version {found.version}, and this is version {_VERSION}; "
                "use one release on both ends"
            )
        return found


class Remote:
    """Another agent, as far as its metadata was loaded. Never changed, only replaced.

    Args:
        generation: identifies the whole metadata; later parts of it keep the generation.
        changes: of the whole metadata.
    """

    def __init__(
        self,
        engine: TransferEngine,
        address: bytes,
        memory: dict[tuple[int, int], bytes],
        generation: object,
        changes: int,
    ) -> None:
        self._engine, self._address, self._memory = engine, address, memory
        self.generation, self._changes = generation, changes
        self.peer: Peer = engine.peer(EngineAddress.from_bytes(address))

    @functools.cached_property
    def space(self) -> AddressSpace[RemoteRegion]:
        return AddressSpace(
            (first, self._engine.import_region(RegionDescriptor.from_bytes(descriptor)))
            for (first, _), descriptor in self._memory.items()
        )

    @classmethod
    def loaded(cls, engine: TransferEngine, metadata: Metadata, known: Remote | None) -> Remote:
        """The agent with what the metadata adds; a new incarnation of it begins anew. What it told
        before `known` adds nothing: the rest was deregistered.

        Raises:
            nixlNotFoundError: a part of an agent of which no address is known.
            nixlMismatchError: it holds what isn't an address or a descriptor.
        """
        address = metadata.address or (known._address if known else b"")
        if not address:
            raise nixlNotFoundError(
                f"nothing is known of agent {metadata.name!r}; send it metadata with connection "
                "info first"
            )
        memory = {(m.first, m.nbytes): m.descriptor for m in metadata.memory}
        generation, changes = object(), metadata.changes if metadata.whole else 0
        if known is not None and known._address == address:
            if not metadata.whole:
                memory, generation = known._memory | memory, known.generation
                changes = known._changes
            elif changes < known._changes:
                return known
        try:
            for descriptor in memory.values():
                RegionDescriptor.from_bytes(descriptor)
            return cls(engine, address, memory, generation, changes)
        except DecodeError as error:
            raise nixlMismatchError(f"metadata of {metadata.name!r} is broken: {error}") from error


class RemoteAgents:
    """Agents whose metadata was loaded, by name. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, Remote] = {}
        self._replaced: set[str] = set()
        """Incarnations in whose place a later one was loaded."""

    def load(self, engine: TransferEngine, metadata: Metadata) -> None:
        """Learns of an agent, or more of it; raises what :meth:`Remote.loaded` does."""
        with self._lock:
            known = self._loaded.get(metadata.name)
            loaded = self._loaded[metadata.name] = Remote.loaded(engine, metadata, known)
            if known is not None:
                self._replaced.add(known.peer.id)
            self._replaced.discard(loaded.peer.id)

    def is_replaced(self, incarnation: str) -> bool:
        """Whether another incarnation of that agent was loaded in its place."""
        with self._lock:
            return incarnation in self._replaced

    def get(self, name: str) -> Remote | None:
        with self._lock:
            return self._loaded.get(name)

    def __getitem__(self, name: str) -> Remote:
        if (found := self.get(name)) is None:
            raise nixlNotFoundError(f"agent {name!r} was not added; load its metadata first")
        return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._loaded.pop(name, None)

    def forget_lost(self, name: str, lost: Remote) -> None:
        """Forgets an agent, unless its metadata was loaded again since ``lost``."""
        with self._lock:
            known = self._loaded.get(name)
            if known is not None and known.generation is lost.generation:
                del self._loaded[name]
