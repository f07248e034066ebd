"""Requests and replies between processes, authenticated, by host and port.

One request and one reply per connection, as bytes, or a channel of frames. With a key, both ends
prove over TCP that they have it, the caller first, and every frame after that carries a MAC by a
key of this connection alone. Without a key only processes of the same user on the same host are
answered: over a Unix socket, where the kernel names the caller's user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from fabric_ray._native import stretched_token
from fabric_ray.errors import (
    DecodeError,
    HandshakeError,
    Refused,
    ResourceError,
    TransferTimeout,
    Unreachable,
)

_MAGIC = b"fabric-ray/ask/3"
_NONCE = 32
_MAC = 32
_MOST_BYTES = 256 << 20
_HANDSHAKE_S = 5.0
_EXCHANGE_S = 60.0
_MOST_UNPROVEN = 64
"""Unproven callers may hold so many threads and files; others wait in the kernel's queue."""
_REST_S = 0.1
"""Before the next try where the system has no file or thread to give."""
_ANSWERING = "fabric-answering"
_DONE, _FAILED = b"\x00", b"\x01"


def key_of(token: bytes | None) -> bytes | None:
    """The key that processes with this token share; ``None`` without a token."""
    return None if token is None else stretched_token(token)


class Server:
    """Answers requests, each on a thread of its own.

    Args:
        answer: from a request to a reply; the caller gets the text of what it raises.
        key: shared with all callers; without one, processes of this user on this host may call.
        port: 0 for any that is free, of ``ports`` if these are named and there is a key.
        bind: local addresses to listen on with a key; when empty all that there are (``::``),
            which is more than an engine without ``bind`` listens on.
        ports: the first and the last of those that a firewall lets in. Without a key no peer is
            answered over TCP, and the port that is held for its number is any that is free.

    Raises:
        ResourceError: the port is taken, or all of them, or an address isn't one of this host.
    """

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        *,
        key: bytes | None = None,
        port: int = 0,
        bind: Sequence[str] = (),
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._answer, self._key = answer, key
        first, last = ports if ports and not port else (port, port)
        try:
            self._listeners, self._held = (
                _listen_on_unix(port) if key is None else _listen_on_one_of(first, last, bind)
            )
        except OSError as error:
            where, others = f"port {port}", "choose another, or 0"
            if ports and not port:
                where, others = f"ports {first} to {last}", "name others, or more, in `ports`"
            raise ResourceError(
                f"can't listen at {where}: {error.strerror or error}; {others}", call="bind"
            ) from error
        self.port: int = self._held.getsockname()[1]
        self._closed = False
        self._process = os.getpid()
        self._unproven = threading.BoundedSemaphore(_MOST_UNPROVEN)
        self._accepting = [
            threading.Thread(target=self._accept, args=(one,), name="fabric-accepting", daemon=True)
            for one in self._listeners
        ]
        for thread in self._accepting:
            thread.start()

    def close(self) -> None:
        """Stops answering. A forked child only closes its own files: its parent goes on."""
        self._closed = True
        for listener in {*self._listeners, self._held}:
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        if os.getpid() == self._process:
            for thread in self._accepting:
                if thread is not threading.current_thread():
                    # Until it is back from the kernel, that keeps the address.
                    thread.join(1.0)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_REST_S)
                continue
            self._unproven.acquire()
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name=_ANSWERING, daemon=True
                ).start()
            except RuntimeError:  # no thread can be had
                connection.close()
                self._unproven.release()
                time.sleep(_REST_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, HandshakeError, DecodeError):
            try:
                channel = _prove_to_caller(_Wire(connection, _HANDSHAKE_S), self._key)
            finally:
                self._unproven.release()
            self._serve_channel(channel)

    def _serve_channel(self, channel: Channel) -> None:
        """Serves a caller that has proven itself; its connection is closed afterwards."""
        channel.within(_EXCHANGE_S)
        request = channel.receive()
        try:
            reply = _DONE + self._answer(request)
        except Exception as error:
            reply = _FAILED + str(error).encode()
        channel.within(_EXCHANGE_S)
        channel.send(reply)


def call(
    host: str, port: int, request: bytes, *, key: bytes | None = None, timeout: float = 10.0
) -> bytes:
    """The reply of the server that listens there.

    Raises:
        Unreachable: no process listens.
        HandshakeError: it has another key, or is another user's.
        Refused: it can't answer that; the message says why.
        TransferTimeout: its reply wasn't whole within ``timeout`` seconds.
    """
    peer = f"{host}:{port}"
    try:
        with open_channel(host, port, key=key, timeout=timeout) as channel:
            channel.send(request)
            reply = channel.receive()
    except TimeoutError as error:
        raise TransferTimeout(
            f"{peer} did not answer within {timeout:g} s; see whether it is stuck",
            peer=peer,
            after=timeout,
            quiesced=True,
            missing=0,
        ) from error
    except EOFError as error:
        raise HandshakeError(
            f"{peer} hung up; both ends need the same FABRIC_RAY_TOKEN", peer=peer
        ) from error
    except OSError as error:
        hint = "" if key else "; without a FABRIC_RAY_TOKEN only this host is asked"
        raise Unreachable(
            f"no process answers at {peer} ({error.strerror or error}){hint}", peer=peer
        ) from error
    if reply[:1] != _DONE:
        raise Refused(f"{peer} refused: {reply[1:].decode(errors='replace')}", peer=peer)
    return reply[1:]


def open_channel(host: str, port: int, *, key: bytes | None, timeout: float) -> Channel:
    """A channel to the server that listens there, which has proven itself.

    Args:
        timeout: seconds, for what is sent and received, too, until :meth:`Channel.within`.

    Raises:
        HandshakeError: it has another key, or is another user's.
        OSError, EOFError: no server listens there, or it hung up.
    """
    connection = _connect(host, port, key, timeout)
    try:
        return _prove_to_server(_Wire(connection, timeout), key, f"{host}:{port}")
    except BaseException:
        connection.close()
        raise


class _Wire:
    """A connection on which everything has to be over at one time, however slowly bytes come."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Sets the deadline, from now."""
        self._deadline = time.monotonic() + seconds

    def send(self, data: bytes) -> None:
        self._limit()
        self.connection.sendall(data)

    def exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._limit()
            part = self.connection.recv(min(nbytes - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)


class Channel:
    """Frames over a connection: a length, the bytes, and what authenticates them."""

    def __init__(self, wire: _Wire, key: bytes | None, *, calls: bool) -> None:
        self._wire, self._key = wire, key
        self._out, self._in = (b"ask", b"answer") if calls else (b"answer", b"ask")
        self._sent = self._received = 0

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def within(self, seconds: float) -> None:
        """Sets the deadline of what is sent and received, from now."""
        self._wire.within(seconds)

    def fileno(self) -> int:
        return self._wire.connection.fileno()

    def keep(self) -> None:
        """Keeps the connection when a :class:`Server` has served it: the caller closes it."""
        self._wire.connection = self._wire.connection.dup()

    def close(self) -> None:
        self._wire.connection.close()

    def send(self, body: bytes) -> None:
        mac = self._mac(self._out, self._sent, body)
        self._sent += 1
        self._wire.send(struct.pack("<Q", len(body)) + body + mac)

    def receive(self) -> bytes:
        (nbytes,) = struct.unpack("<Q", self._wire.exactly(8))
        if nbytes > _MOST_BYTES:
            raise DecodeError(f"a frame of {nbytes} bytes is longer than any can be")
        body = self._wire.exactly(nbytes)
        mac = self._mac(self._in, self._received, body)
        self._received += 1
        if not hmac.compare_digest(mac, self._wire.exactly(len(mac))):
            raise DecodeError("a frame came changed")
        return body

    def _mac(self, way: bytes, number: int, body: bytes) -> bytes:
        # Way and number keep a frame from being taken for another of this connection.
        if self._key is None:
            return b""
        return _sign(self._key, way, struct.pack("<Q", number), body)


def _prove_to_server(wire: _Wire, key: bytes | None, peer: str) -> Channel:
    if key is None:
        _check_same_user(wire.connection, peer)
        wire.send(_MAGIC)
        return Channel(wire, None, calls=True)
    mine = secrets.token_bytes(_NONCE)
    wire.send(_MAGIC + mine)
    theirs = wire.exactly(_NONCE)
    wire.send(_sign(key, b"asks", mine, theirs))
    if not hmac.compare_digest(wire.exactly(_MAC), _sign(key, b"answers", mine, theirs)):
        raise HandshakeError(
            f"{peer} knows another token; both ends need the same FABRIC_RAY_TOKEN", peer=peer
        )
    return Channel(wire, _sign(key, b"key", mine, theirs), calls=True)


def _prove_to_caller(wire: _Wire, key: bytes | None) -> Channel:
    if key is None:
        _check_same_user(wire.connection, "the caller")
    if wire.exactly(len(_MAGIC)) != _MAGIC:
        raise HandshakeError("the caller speaks another protocol", peer="")
    if key is None:
        return Channel(wire, None, calls=False)
    theirs = wire.exactly(_NONCE)
    mine = secrets.token_bytes(_NONCE)
    wire.send(mine)
    if not hmac.compare_digest(wire.exactly(_MAC), _sign(key, b"asks", theirs, mine)):
        raise HandshakeError("the peer knows another token", peer="")
    # Last: a stranger that connects gets no MAC to guess a token by.
    wire.send(_sign(key, b"answers", theirs, mine))
    return Channel(wire, _sign(key, b"key", theirs, mine), calls=False)


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + b"".join(parts), hashlib.sha256)


def peer_user(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(user)


def _check_same_user(connection: socket.socket, peer: str) -> None:
    if (user := peer_user(connection)) != os.geteuid():
        raise HandshakeError(
            f"{peer} is of user {user} and this process of user {os.geteuid()}; give both the same "
            "FABRIC_RAY_TOKEN",
            peer=peer,
        )


def _unix_name(port: int) -> bytes:
    return b"\0fabric-ray/ask/%d" % port


def _connect(host: str, port: int, key: bytes | None, timeout: float) -> socket.socket:
    if key is not None:
        return socket.create_connection((host, port), timeout)
    if not _is_here(host, port):
        raise OSError("it is another host")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(_unix_name(port))
    except OSError:
        connection.close()
        raise
    return connection


def _is_here(host: str, port: int) -> bool:
    """Whether the host's address is one of this host."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def _listen_on_unix(port: int) -> tuple[list[socket.socket], socket.socket]:
    """A listener, and a TCP socket that keeps the port's number from others."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        listener.bind(_unix_name(held.getsockname()[1]))
        listener.listen(128)
    except OSError:
        held.close()
        listener.close()
        raise
    return [listener], held


def _listen_on_one_of(
    first: int, last: int, bind: Sequence[str]
) -> tuple[list[socket.socket], socket.socket]:
    """As :func:`_listen_on_tcp`, at the first port that is free at each address."""
    for port in range(first, last):
        try:
            return _listen_on_tcp(port, bind)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_on_tcp(last, bind)


def _listen_on_tcp(port: int, bind: Sequence[str]) -> tuple[list[socket.socket], socket.socket]:
    """Listeners on all of these addresses at one port, the first of them again."""
    listeners: list[socket.socket] = []
    try:
        for address in bind or ("",):
            both = not address and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
            at = listeners[0].getsockname()[1] if listeners else port
            listeners.append(
                socket.create_server((address, at), family=family, backlog=128, dualstack_ipv6=both)
            )
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners, listeners[0]
