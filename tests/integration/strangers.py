"""Peers written by hand: plain sockets that send messages of the engine's protocol."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import zlib
from pathlib import Path

TRANSPORTS = ["shm", "tcp"]
HANDSHAKE = 2
"""The version of handshake messages."""
BY_TOKEN = 2
"""What a side proves itself by; 1 is the user's key, 0 what the kernel says of it."""
NAME = b"\x01x"
"""Of an engine that was never opened."""


def tcp_port() -> int:
    """The port that this process listens on."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return int(ports[0].split(":")[1], 16)


def sealed(magic: bytes, body: bytes, version: int = 1) -> bytes:
    """An intact envelope, as `fabric_ray` reads it."""
    return magic + version.to_bytes(2, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def hello(
    to: str,
    *,
    protocol: tuple[int, int] = (1, 1),
    version: int = HANDSHAKE,
    secret: int = BY_TOKEN,
) -> bytes:
    """The first message of a handshake, which offers the oldest and the newest version."""
    transport = sealed(b"FRts", bytes(16) + bytes([0, 1]))
    sender = bytes(16) + NAME + bytes(1)  # no endpoints
    body = bytes([0, *protocol]) + sender + bytes.fromhex(to) + bytes(32) + bytes([secret])
    return sealed(b"FRhs", body + bytes([len(transport)]) + transport, version)


class Stranger:
    """A plain socket on an engine's door."""

    def __init__(self, transport: str, engine_id: str, port: int) -> None:
        self.tcp = transport == "tcp"
        if self.tcp:
            self.socket = socket.create_connection(("127.0.0.1", port))
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.socket.connect(f"\0fabric-ray/{engine_id}")

    def say(self, message: bytes) -> None:
        say(self.socket, message, tcp=self.tcp)

    def hear(self, timeout: float = 10.0) -> bytes:
        self.socket.settimeout(timeout)
        return self.socket.recv(65536)

    def hear_message(self) -> bytes:
        """One message of a handshake, whole."""
        return hear(self.socket, tcp=self.tcp)

    def hear_to_the_end(self) -> bytes:
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while more := self.hear():
                heard += more
        self.socket.close()
        return heard


def say(connection: socket.socket, message: bytes, *, tcp: bool) -> None:
    connection.sendall(struct.pack("<I", len(message)) + message if tcp else message)


def hear(connection: socket.socket, *, tcp: bool) -> bytes:
    """One message; nothing if the other side has closed."""
    connection.settimeout(10)
    try:
        if not tcp:
            return connection.recv(65536)
        with connection.makefile("rb") as stream:
            head = stream.read(4)
            return stream.read(struct.unpack("<I", head)[0]) if head else b""
    except ConnectionResetError:
        return b""


def mac(key: bytes, role: bytes, hello: bytes, welcome: bytes) -> bytes:
    """Over both messages as they came, each with its length before it."""
    said = b"".join(struct.pack("<Q", len(part)) + part for part in (role, hello, welcome))
    return hmac.new(key, said, hashlib.sha256).digest()
