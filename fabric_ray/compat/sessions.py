"""Peers by ``host:port``: the process there answers with its engine's address and its memory."""

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
    """Whose table the caller has, by the engine's id, and which version of it."""
    version: int


class _Table(msgspec.Struct, frozen=True, array_like=True):
    address: bytes
    version: int
    regions: list[tuple[int, bytes]] | None
    """First addresses and descriptors; ``None`` if what the caller has still holds."""


class Session(NamedTuple):
    """A peer, as it was when it was last asked."""

    peer: Peer
    version: int
    first: int | None
    """Where the region begins that it registered first."""
    space: AddressSpace[RemoteRegion]
    number: int
    """Which question it answers, of those that were asked here, in their order."""

    def is_newer_than(self, other: Session) -> bool:
        """Of one incarnation by its version; of two, the one that was asked for later."""
        if self.peer.id == other.peer.id:
            return self.version > other.version
        return self.number > other.number


class Sessions:
    """An engine that is found by ``host:port``, and what it has found out about others.

    Args:
        host: how peers reach this host.
        port: 0 for any that is free.
        registered: the memory that peers are told of.

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
        """The peer of that session id; asked if it isn't known.

        Raises:
            Unreachable: no process answers there.
            HandshakeError: the process there knows another token, or is another user's.
        """
        with self._lock:
            known = self._known.get(name)
        return known or self.learn(name)

    def again(self, name: str, last: Session) -> Session:
        """The same incarnation of a peer, as it is now.

        Raises:
            Stale: it is another; addresses of the last one mean nothing there.
        """
        session = self.learn(name)
        if session.peer.id != last.peer.id:
            raise Stale(f"{name} has restarted; ask it for its addresses again before you use them")
        return session

    def learn(self, name: str) -> Session:
        """The peer, asked anew, whichever incarnation it is."""
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
            # Another thread may have been told more since.
            if other is not None and other.is_newer_than(session):
                return other
            self._known[name] = session
        return session

    def ask(self, name: str, known: Session | None = None) -> _Table:
        """What the peer answers to a caller that has `known` of it; nothing is kept."""
        incarnation, version = (known.peer.id, known.version) if known else ("", -1)
        question = msgspec.msgpack.encode(_Question(incarnation, version))
        host, port = host_and_port(name)
        try:
            return _decoded(call(host, port, question, key=self._key))
        except Unreachable:
            self.forget(name, known)
            raise

    def forget(self, name: str, session: Session | None) -> None:
        """Lets go of a peer that is lost, unless another incarnation was found there since."""
        with self._lock:
            known = self._known.get(name)
            if known is not None and session is not None and known.peer.id == session.peer.id:
                del self._known[name]

    def answer(self, request: bytes) -> bytes:
        """Tells a peer this engine's address and memory."""
        question = from_msgpack(request, _Question)
        version, regions = self._registered.listed()
        address = self.engine.address
        told = None
        if (question.incarnation, question.version) != (address.id, version):
            told = [(first, region.descriptor().to_bytes()) for first, region in regions]
        return msgspec.msgpack.encode(_Table(address.to_bytes(), version, told))


def host_and_port(name: str) -> tuple[str, int]:
    """Of ``host``, ``host:port`` or ``[address]:port``; port 0 if there is none.

    Raises:
        InvalidArgument: it is none of these.
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
