"""What moves bytes, and what it is measured by: an engine, a socket, a copy.

A way between two processes has two ends here: the near one measures, and calls methods of the far
one over a pipe.
"""

from __future__ import annotations

import multiprocessing
import secrets
import socket
import subprocess
import sys
import time
import zlib
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric_ray.bench.figures import PING_NBYTES
from fabric_ray.engine import CounterRef, RegionDescriptor, TransferEngine
from fabric_ray.errors import FabricError

Bytes = npt.NDArray[np.uint8]
_TIMEOUT_S = 60.0
"""For one turn: long enough for any machine, and an end where the other side is gone."""
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
        self._source, self._target = _noise(nbytes), np.zeros(nbytes, np.uint8)
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
        _check(self.name, self._source[:nbytes], zlib.crc32(self._target[:nbytes].data))

    def close(self) -> None:
        return


class _Near(ABC):
    """The end that measures."""

    def __init__(self, name: str, nbytes: int, token: bytes = b"") -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            program = "from fabric_ray.bench.ways import serve; serve()"
            command = [sys.executable, "-c", program, str(number)]
            # A session of its own: Ctrl-C is for this side, the other one ends with the pipe.
            self._process = subprocess.Popen(command, pass_fds=[number], start_new_session=True)
        self._pipe.send((name, nbytes, token))
        self._source = _noise(nbytes)
        self._at = 0

    @abstractmethod
    def _send(self, offsets: list[int], nbytes: int) -> None:
        """Sends blocks; each is complete here afterwards."""

    @abstractmethod
    def _rounds(self, count: int) -> float:
        """Seconds for so many small blocks, each answered; has the far end answer them before."""

    def stream(self, nbytes: int, count: int) -> float:
        blocks = len(self._source) // nbytes
        offsets = [(self._at + i) % blocks * nbytes for i in range(count)]
        self._at = (self._at + count) % blocks
        self._ask("take", offsets, nbytes)
        begin = time.perf_counter()
        self._send(offsets, nbytes)
        end: float = self._answer()
        return end - begin

    def ping(self, count: int) -> float | None:
        took = self._rounds(count)
        self._answer()
        return took / count / 2

    def restart(self) -> None:
        self._ask("clear")
        self._at = 0

    def verify(self, nbytes: int) -> None:
        _check(self.name, self._source[:nbytes], self._ask("digest", nbytes))

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            # It waits for what will not come any more.
            self._process.kill()
            self._process.wait()

    def _ask(self, *question: Any) -> Any:
        # Where nothing reads any more, what was said last tells why.
        with suppress(ConnectionError):
            self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(_TIMEOUT_S):
            raise FabricError(f"the other process of {self.name} does not answer any more")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise FabricError(
                f"the other process of {self.name} ended with {self._process.wait()}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Far(ABC):
    """The end that memory is written to."""

    memory: Bytes

    def meet(self, pipe: Connection) -> None:
        """Tells how it is reached, and is reached."""
        self._pipe = pipe

    def clear(self) -> None:
        self.memory[:] = 0

    def digest(self, nbytes: int) -> int:
        return zlib.crc32(self.memory[:nbytes].data)

    @abstractmethod
    def take(self, offsets: list[int], nbytes: int) -> float:
        """When all blocks had come, on the clock that all processes share."""

    @abstractmethod
    def close(self) -> None: ...


class Engine(_Near):
    """Counted writes of one engine into the region of another, all of them under way at once."""

    def __init__(self, transport: str, nbytes: int) -> None:
        token = secrets.token_bytes(16)
        # What this machine can't do is said here, before a process is started for it.
        self._engine = TransferEngine(name="bench-near", transport=transport, token=token)
        super().__init__(transport, nbytes, token)
        try:
            descriptor, self._ref = self._answer()
        except BaseException:
            self.close()
            raise
        self._there = self._engine.import_region(descriptor)
        self._region = self._engine.alloc(nbytes)
        self._region.numpy()[:] = self._source
        self._inbox, self._counter = self._engine.alloc(PING_NBYTES), self._engine.counter()

    def _send(self, offsets: list[int], nbytes: int) -> None:
        writes = [
            self._engine.write(
                self._region.slice(at, nbytes), self._there.slice(at, nbytes), imm=self._ref
            )
            for at in offsets
        ]
        for write in writes:
            write.wait()

    def _rounds(self, count: int) -> float:
        source, there = self._region.slice(0, PING_NBYTES), self._there.slice(0, PING_NBYTES)
        self._ask("echo", count, self._inbox.descriptor(), self._counter.ref)
        begin = time.perf_counter()
        for _ in range(count):
            write = self._engine.write(source, there, imm=self._ref)
            self._counter.wait(1, timeout=_TIMEOUT_S)
            write.wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        # The other engine hears that this one goes.
        self._engine.close()
        super().close()


class _FarEngine(_Far):
    """An engine with a region and a counter."""

    def __init__(self, transport: str, nbytes: int, token: bytes) -> None:
        self._engine = TransferEngine(name="bench-far", transport=transport, token=token)
        self._inbox, self._counter = self._engine.alloc(nbytes), self._engine.counter()
        self._reply = self._engine.alloc(PING_NBYTES)
        self.memory = self._inbox.numpy()

    def meet(self, pipe: Connection) -> None:
        super().meet(pipe)
        pipe.send((self._inbox.descriptor(), self._counter.ref))

    def take(self, offsets: list[int], nbytes: int) -> float:
        expected = self._counter.expect(len(offsets), timeout=_TIMEOUT_S)
        self._pipe.send("ready")
        expected.wait()
        return time.perf_counter()

    def echo(self, count: int, there: RegionDescriptor, ref: CounterRef) -> None:
        """Answers each of ``count`` writes with one of its own."""
        remote = self._engine.import_region(there)
        self._pipe.send("ready")
        for _ in range(count):
            self._counter.wait(1, timeout=_TIMEOUT_S)
            self._engine.write(self._reply, remote, imm=ref).wait()

    def close(self) -> None:
        self._engine.close()


class Socket(_Near):
    """One TCP connection over the loopback interface, written and read by plain calls."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("socket", nbytes)
        self._socket = socket.create_connection(self._answer(), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, offsets: list[int], nbytes: int) -> None:
        for at in offsets:
            self._socket.sendall(self._source.data[at : at + nbytes])

    def _rounds(self, count: int) -> float:
        memory = memoryview(bytearray(PING_NBYTES))
        self._ask("echo", count, PING_NBYTES)
        begin = time.perf_counter()
        for _ in range(count):
            self._socket.sendall(memory)
            _receive(self._socket, memory)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._socket.close()
        super().close()


class _FarSocket(_Far):
    """A TCP socket on the loopback interface that reads into memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self._socket = socket.create_server(("127.0.0.1", 0))

    def meet(self, pipe: Connection) -> None:
        super().meet(pipe)
        with self._socket as server:
            server.settimeout(_TIMEOUT_S)
            pipe.send(server.getsockname())
            self._socket, _ = server.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(_TIMEOUT_S)

    def take(self, offsets: list[int], nbytes: int) -> float:
        self._pipe.send("ready")
        for at in offsets:
            _receive(self._socket, self.memory.data[at : at + nbytes])
        return time.perf_counter()

    def echo(self, count: int, nbytes: int) -> None:
        memory = memoryview(bytearray(nbytes))
        self._pipe.send("ready")
        for _ in range(count):
            _receive(self._socket, memory)
            self._socket.sendall(memory)

    def close(self) -> None:
        self._socket.close()


def serve() -> None:
    """The far process; its only argument is the descriptor of its end of the pipe. Answers calls,
    a method's name and its arguments, until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):
        way, nbytes, token = pipe.recv()
        try:
            made: _Far = _FarSocket(nbytes) if way == "socket" else _FarEngine(way, nbytes, token)
        except Exception as error:
            # It is for the side that measures to say what it means.
            pipe.send(error)
            return
        with closing(made) as far:
            far.meet(pipe)
            while True:
                name, *arguments = pipe.recv()
                try:
                    pipe.send(getattr(far, name)(*arguments))
                except Exception as error:
                    pipe.send(error)


def _receive(connection: socket.socket, memory: memoryview) -> None:
    """Fills the memory.

    Raises:
        ConnectionError: the other side closed before it was full.
    """
    while memory.nbytes:
        taken = connection.recv_into(memory)
        if not taken:
            raise ConnectionError("the other side of the benchmark has closed its socket")
        memory = memory[taken:]


def _noise(nbytes: int) -> Bytes:
    """Bytes that no zeroes or earlier ones can be taken for."""
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def _check(way: str, sent: Bytes, arrived: int) -> None:
    """Raises FabricError if the digests differ."""
    if zlib.crc32(sent.data) != arrived:
        raise FabricError(f"{way}: the bytes that arrived are not those that were sent")
