"""The other process: memory that is written to, a counter, and a socket that reads."""

from __future__ import annotations

import socket
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from fabric_ray.engine import CounterRef, RegionDescriptor, TransferEngine

PATIENCE_S = 60.0
"""For one turn: long enough for any machine, and an end where the other side is gone."""


def serve(pipe: Connection) -> None:
    """Answers what is asked over the pipe until it is closed: a method's name and its arguments."""
    with suppress(EOFError, BrokenPipeError), ExitStack() as stack:
        way, nbytes, token = pipe.recv()
        try:
            far = SocketFar(nbytes) if way == "socket" else EngineFar(way, nbytes, token)
        except Exception as error:
            # It is for the side that measures to say what it means.
            pipe.send(error)
            return
        stack.callback(far.close)
        far.meet(pipe)
        while True:
            name, *arguments = pipe.recv()
            method: Callable[..., Any] = getattr(far, name)
            try:
                pipe.send(method(*arguments))
            except Exception as error:
                pipe.send(error)


class EngineFar:
    """An engine with a region and a counter."""

    def __init__(self, transport: str, nbytes: int, token: bytes) -> None:
        self._engine = TransferEngine(name="bench-far", transport=transport, token=token)
        self._inbox = self._engine.alloc(nbytes)
        self._counter = self._engine.counter()
        self._answer = self._engine.alloc(8)

    def meet(self, pipe: Connection) -> None:
        self._pipe = pipe
        pipe.send((self._inbox.descriptor(), self._counter.ref))

    def clear(self) -> None:
        self._inbox.numpy()[:] = 0

    def digest(self, nbytes: int) -> int:
        return zlib.crc32(self._inbox.numpy()[:nbytes].data)

    def take(self, nbytes: int, count: int) -> float:
        """When ``count`` writes had been counted, on the clock that all processes share."""
        del nbytes
        expected = self._counter.expect(count, timeout=PATIENCE_S)
        self._pipe.send("ready")
        expected.wait()
        return time.perf_counter()

    def echo(self, count: int, there: RegionDescriptor, ref: CounterRef) -> None:
        """Answers each of ``count`` writes with one of its own."""
        remote = self._engine.import_region(there)
        self._pipe.send("ready")
        for _ in range(count):
            self._counter.wait(1, timeout=PATIENCE_S)
            self._engine.write(self._answer, remote, imm=ref).wait()

    def close(self) -> None:
        self._engine.close()


class SocketFar:
    """A TCP socket on the loopback interface that reads into memory."""

    def __init__(self, nbytes: int) -> None:
        self._inbox = np.zeros(nbytes, np.uint8)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._at = 0

    def meet(self, pipe: Connection) -> None:
        self._pipe = pipe
        with self._socket as server:
            server.settimeout(PATIENCE_S)
            pipe.send(server.getsockname())
            self._socket, _ = server.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(PATIENCE_S)

    def clear(self) -> None:
        self._inbox[:], self._at = 0, 0

    def digest(self, nbytes: int) -> int:
        return zlib.crc32(self._inbox[:nbytes].data)

    def take(self, nbytes: int, count: int) -> float:
        memory, blocks = self._inbox.data, len(self._inbox) // nbytes
        self._pipe.send("ready")
        for _ in range(count):
            receive(self._socket, memory[self._at * nbytes : (self._at + 1) * nbytes])
            self._at = (self._at + 1) % blocks
        return time.perf_counter()

    def echo(self, count: int, nbytes: int) -> None:
        memory = memoryview(bytearray(nbytes))
        self._pipe.send("ready")
        for _ in range(count):
            receive(self._socket, memory)
            self._socket.sendall(memory)

    def close(self) -> None:
        self._socket.close()


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fills the memory.

    Raises:
        ConnectionError: the other side closed before it was full.
    """
    while memory.nbytes:
        taken = connection.recv_into(memory)
        if not taken:
            raise ConnectionError("the other side of the benchmark has closed its socket")
        memory = memory[taken:]


def main() -> None:
    """The whole process; its only argument is the descriptor of its end of the pipe."""
    serve(Connection(int(sys.argv[1])))
