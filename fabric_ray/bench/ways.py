"""What moves bytes, and what it is measured by: an engine, a socket, a copy."""

from __future__ import annotations

import multiprocessing
import secrets
import socket
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric_ray.bench.far import PATIENCE_S, receive
from fabric_ray.bench.figures import PING_NBYTES
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError

Bytes = npt.NDArray[np.uint8]
_FAREWELL_S = 2.0


class Way(Protocol):
    """Moves blocks, each to another place than the one before, so that caches hold neither end."""

    name: str

    def stream(self, nbytes: int, count: int) -> float:
        """Seconds for ``count`` blocks, until the receiver knows that they are there."""

    def ping(self, count: int) -> float | None:
        """Seconds of one trip of :data:`PING_NBYTES`, from ``count`` rounds, if it has trips."""

    def restart(self) -> None:
        """Clears the target, and begins at its start again."""

    def verify(self, nbytes: int) -> None:
        """Compares the first ``nbytes``.

        Raises:
            FabricError: they are other ones.
        """

    def close(self) -> None: ...


class Copy:
    """One thread copies within one process: what no way through memory is faster than by much."""

    name = "copy"

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = noise(nbytes), np.zeros(nbytes, np.uint8)
        self._at = 0

    def stream(self, nbytes: int, count: int) -> float:
        blocks = len(self._source) // nbytes
        begin = time.perf_counter()
        for _ in range(count):
            part = slice(self._at * nbytes, (self._at + 1) * nbytes)
            self._target[part] = self._source[part]
            self._at = (self._at + 1) % blocks
        return time.perf_counter() - begin

    def ping(self, count: int) -> float | None:
        del count
        return None

    def restart(self) -> None:
        self._target[:], self._at = 0, 0

    def verify(self, nbytes: int) -> None:
        check(
            self.name,
            zlib.crc32(self._source[:nbytes].data),
            zlib.crc32(self._target[:nbytes].data),
        )

    def close(self) -> None:
        return


class _Between:
    """A way between two processes: this one asks the other over a pipe."""

    def __init__(self, name: str, nbytes: int, token: bytes = b"") -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            program = "from fabric_ray.bench.far import main; main()"
            command = [sys.executable, "-c", program, str(number)]
            # A session of its own: Ctrl-C is for this side, the other one ends with the pipe.
            self._process = subprocess.Popen(command, pass_fds=[number], start_new_session=True)
        self._pipe.send((name, nbytes, token))
        self._at = 0

    def _hear(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise FabricError(f"the other process of {self.name} says nothing any more")
        try:
            heard = self._pipe.recv()
        except EOFError:
            raise FabricError(
                f"the other process of {self.name} ended with {self._process.wait()}"
            ) from None
        if isinstance(heard, Exception):
            raise heard
        return heard

    def _ask(self, *question: Any) -> Any:
        # Where nobody reads any more, what was said last tells why.
        with suppress(BrokenPipeError):
            self._pipe.send(question)
        return self._hear()

    def restart(self) -> None:
        self._ask("clear")
        self._at = 0

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            # It waits for what will not come any more.
            self._process.kill()
            self._process.wait()


class Engine(_Between):
    """Counted writes of one engine into the region of another, all of them under way at once."""

    def __init__(self, transport: str, nbytes: int) -> None:
        token = secrets.token_bytes(16)
        # What this machine can't do is said here, before a process is started for it.
        self._engine = TransferEngine(name="bench-near", transport=transport, token=token)
        super().__init__(transport, nbytes, token)
        try:
            descriptor, self._ref = self._hear()
        except BaseException:
            self.close()
            raise
        self._there = self._engine.import_region(descriptor)
        self._source = self._engine.alloc(nbytes)
        self._source.numpy()[:] = noise(nbytes)
        self._inbox, self._counter = self._engine.alloc(PING_NBYTES), self._engine.counter()

    def stream(self, nbytes: int, count: int) -> float:
        blocks = self._source.nbytes // nbytes
        at = [(self._at + i) % blocks * nbytes for i in range(count)]
        self._at = (self._at + count) % blocks
        self._ask("take", nbytes, count)
        begin = time.perf_counter()
        writes = [
            self._engine.write(
                self._source.slice(offset, nbytes),
                self._there.slice(offset, nbytes),
                imm=self._ref,
            )
            for offset in at
        ]
        for write in writes:
            write.wait()
        end: float = self._hear()
        return end - begin

    def ping(self, count: int) -> float | None:
        source, there = self._source.slice(0, PING_NBYTES), self._there.slice(0, PING_NBYTES)
        self._ask("echo", count, self._inbox.descriptor(), self._counter.ref)
        begin = time.perf_counter()
        for _ in range(count):
            write = self._engine.write(source, there, imm=self._ref)
            self._counter.wait(1, timeout=PATIENCE_S)
            write.wait()
        took = time.perf_counter() - begin
        self._hear()
        return took / count / 2

    def verify(self, nbytes: int) -> None:
        check(
            self.name, zlib.crc32(self._source.numpy()[:nbytes].data), self._ask("digest", nbytes)
        )

    def close(self) -> None:
        # The other engine hears that this one goes.
        self._engine.close()
        super().close()


class Socket(_Between):
    """One TCP connection over the loopback interface, written and read by plain calls."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("socket", nbytes)
        self._source = noise(nbytes)
        self._socket = socket.create_connection(self._hear(), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stream(self, nbytes: int, count: int) -> float:
        memory, blocks = self._source.data, len(self._source) // nbytes
        self._ask("take", nbytes, count)
        begin = time.perf_counter()
        for _ in range(count):
            self._socket.sendall(memory[self._at * nbytes : (self._at + 1) * nbytes])
            self._at = (self._at + 1) % blocks
        end: float = self._hear()
        return end - begin

    def ping(self, count: int) -> float | None:
        memory = memoryview(bytearray(PING_NBYTES))
        self._ask("echo", count, PING_NBYTES)
        begin = time.perf_counter()
        for _ in range(count):
            self._socket.sendall(memory)
            receive(self._socket, memory)
        took = time.perf_counter() - begin
        self._hear()
        return took / count / 2

    def verify(self, nbytes: int) -> None:
        check(self.name, zlib.crc32(self._source[:nbytes].data), self._ask("digest", nbytes))

    def close(self) -> None:
        self._socket.close()
        super().close()


def noise(nbytes: int) -> Bytes:
    """Bytes that no zeroes or earlier ones can be taken for."""
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def check(way: str, sent: int, arrived: int) -> None:
    """Raises FabricError if the digests differ."""
    if sent != arrived:
        raise FabricError(f"{way}: the bytes that arrived are not those that were sent")
