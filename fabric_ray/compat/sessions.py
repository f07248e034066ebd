"""Peers by ``host:port``, which answer with the address of their engine and their memory."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import NamedTuple

import msgspec

from fabric_ray.compat.addresses import AddressSpace, Registered
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import (
    EngineAddress,
    EngineConfig,
    Peer,
    RegionDescriptor,
    RemoteRegion,
    TransferEngine,
)
from fabric_ray.errors import DecodeError, InvalidArgument, Stale, Unreachable
from fabric_ray.rpc import Server, call, key_of


class _Question(msgspec.Struct, frozen=True, array_like=True):
    incarnation: str
    """The engine whose table the caller has, and the version of that table."""
    version: int


class _Table(msgspec.Struct, frozen=True, array_like=True):
    address: bytes
    version: int
    regions: list[tuple[int, bytes]] | None
    """First addresses and descriptors; ``None`` if the caller's table is up to date."""


class Session(NamedTuple):
    """A peer, by its last answer."""

    peer: Peer
    version: int
    first: int | None
    """The first address of the region that it registered first."""
    space: AddressSpace[RemoteRegion]
    number: int
    """The number of the question that it answered, in the order of questions from here."""

    def is_newer_than(self, other: Session) -> bool:
        """By version for one incarnation; by the number of the question for two."""
        if self.peer.id == other.peer.id:
            return self.version > other.version
        return self.number > other.number


class Sessions:
    """An engine that peers find by ``host:port``, and the peers that it knows.

    Args:
        host: the name or address by which peers reach this host.
        port: 0 for any that is free.
        registered: the memory that peers may use.

    Raises:
        ResourceError: the port is taken.
        FabricError: the engine can't be opened.
    """

    def __init__(self, host: str, port: int, config: EngineConfig, registered: Registered) -> None:
        me = weakref.ref(self)
        self._registered = registered
        self._key = key_of(config.token)
        self._known: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._server = Server(
            lambda request: _answer(me(), request),
            key=self._key,
            port=port,
            bind=config.bind,
            ports=config.ports,
        )
        self.port = self._server.port
        self.name = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        try:
            self.engine = TransferEngine(config, name=self.name)
        except BaseException:
            self._server.close()
            raise
        weakref.finalize(self, _shut, self._server, self.engine)

    def at(self, name: str) -> Session:
        """The peer of that session id; asks it if it is unknown.

        Raises:
            Unreachable: no process answers there.
            HandshakeError: the process there has another token, or belongs to another user.
        """
        with self._lock:
            known = self._known.get(name)
        return known or self.learn(name)

    def again(self, name: str, last: Session) -> Session:
        """Asks the same incarnation of a peer again.

        Raises:
            Stale: it has restarted; addresses of the earlier incarnation are invalid.
        """
        session = self.learn(name)
        if session.peer.id != last.peer.id:
            raise Stale(f"{name} has restarted; ask it for its addresses again before you use them")
        return session

    def learn(self, name: str) -> Session:
        """Asks the peer again; any incarnation may answer."""
        with self._lock:
            known = self._known.get(name)
            number = next(self._numbers)
        table = self.ask(name, known)
        if table.regions is None and known is not None:
            return known
        regions = [
            (first, self.engine.import_region(RegionDescriptor.from_bytes(descriptor)))
            for first, descriptor in table.regions or []
        ]
        peer = self.engine.peer(EngineAddress.from_bytes(table.address))
        first = regions[0][0] if regions else None
        session = Session(peer, table.version, first, AddressSpace(regions), number)
        with self._lock:
            other = self._known.get(name)
            # Another thread may have had a later answer.
            if other is not None and other.is_newer_than(session):
                return other
            self._known[name] = session
        return session

    def ask(self, name: str, known: Session | None = None) -> _Table:
        """Asks the peer for what is newer than `known`; keeps nothing."""
        incarnation, version = (known.peer.id, known.version) if known else ("", -1)
        question = msgspec.msgpack.encode(_Question(incarnation, version))
        host, port = host_and_port(name)
        try:
            return _decoded(call(host, port, question, key=self._key))
        except Unreachable:
            self.forget(name, known)
            raise

    def forget(self, name: str, session: Session | None) -> None:
        """Forgets a lost peer, unless another incarnation is known by now."""
        with self._lock:
            known = self._known.get(name)
            if known is not None and session is not None and known.peer.id == session.peer.id:
                del self._known[name]

    def answer(self, request: bytes) -> bytes:
        """Answers a peer with this engine's address and memory."""
        question = from_msgpack(request, _Question)
        version, regions = self._registered.listed()
        address = self.engine.address
        told = None
        if (question.incarnation, question.version) != (address.id, version):
            told = [(first, region.descriptor().to_bytes()) for first, region in regions]
        return msgspec.msgpack.encode(_Table(address.to_bytes(), version, told))


def host_and_port(name: str) -> tuple[str, int]:
    """Parses ``host``, ``host:port`` or ``[address]:port``; port 0 without one.

    Raises:
        InvalidArgument: the name has another form.
    """
    host, colon, port = name.rpartition(":")
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1], 0
    if not colon or (":" in host and not host.startswith("[")):  # A bare IPv6 address.
        return name, 0
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise InvalidArgument(f"{name!r} is not a host and a port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _answer(sessions: Sessions | None, request: bytes) -> bytes:
    if sessions is None or "engine" not in vars(sessions):
        raise InvalidArgument("it is not open yet, or no longer")
    return sessions.answer(request)


def _decoded(answer: bytes) -> _Table:
    try:
        return from_msgpack(answer, _Table)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"the peer's table of memory is broken: {error}") from error


def _shut(server: Server, engine: TransferEngine) -> None:
    server.close()
    engine.close()
