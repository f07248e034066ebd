"""Transports between two processes of this host, and the plain code that they are measured by."""

from __future__ import annotations

import os
import secrets
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fabric_ray.bench.child import Child
from fabric_ray.bench.machine import cpu
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError, Row, RowHeader
from fabric_ray.bench.table import size
from fabric_ray.bench.turns import Entry, take_turns
from fabric_ray.engine import CounterRef, RegionDescriptor, Transfer, TransferEngine
from fabric_ray.errors import InvalidArgument

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of a write, by default."""
TURNS = 7
"""By default; figures are medians of them."""
PING_NBYTES = 8
"""Of a write that is answered, for latency."""

Bytes = npt.NDArray[np.uint8]
_POOL = 64 << 20
_TURN_NBYTES = 32 << 20
_MOST_WRITES = 1024
_PINGS = 200
_TIMEOUT_S = 60.0
"""For one turn: long enough for any machine, and an end where the other side is gone."""
_FLOORS = {"shm": "copy", "tcp": "socket"}
_MEASURED = ("shm", "tcp", "verbs", "libfabric")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    cpu: str
    cores: int
    """That this process may use."""
    turns: int
    """The fewest of a figure: rows that ``results`` already had may have more or less than asked
    for."""
    seconds: float
    rows: tuple[Row, ...]
    """One for each transport and size, with its floor, where it has one, and ours; then, in us, one
    trip of :data:`PING_NBYTES`, half of a round."""


def measure(
    *,
    transports: Sequence[str] = ("shm", "tcp"),
    sizes: Sequence[int] = SIZES,
    turns: int = TURNS,
    tell: Callable[[str], object] = lambda _: None,
    results: Results | None = None,
) -> Report:
    """Measures each transport between this process and another one on this host.

    Args:
        transports: as an engine names them; those with NICs too.
        sizes: bytes of a write, at most 64 MiB.
        turns: how often each is measured.
        tell: called with what is being measured.
        results: where rows are kept as they are measured; those that it has are not measured.

    Raises:
        InvalidArgument: a size, a number or a name that means nothing.
        FabricError: a transport that doesn't work here.
    """
    for nbytes in sizes:
        if not 1 <= nbytes <= _POOL:
            raise InvalidArgument(f"a write of {nbytes} bytes can't be measured; give 1 to {_POOL}")
    if turns < 1 or not transports:
        raise InvalidArgument("nothing is to be measured; give transports, and 1 turn or more")
    for name in transports:
        if name not in _MEASURED:
            raise InvalidArgument(
                f"transport {name!r} can't be measured; give some of {', '.join(_MEASURED)}"
            )
    began = time.perf_counter()
    results = Results(None) if results is None else results
    known = list(dict.fromkeys(transports))
    sizes = list(dict.fromkeys(sizes))
    keys = []
    with ExitStack() as stack:
        opened: dict[str, Copy | Pair] = {}
        for name in (*dict.fromkeys(_FLOORS[t] for t in known if t in _FLOORS), *known):
            tell(f"starting {name}")
            opened[name] = Copy() if name == "copy" else Pair(name)
            stack.callback(opened[name].close)
        for header, runs in _cases(known, sizes, opened):
            keys.append(header.key)
            if not results.has(header.key):
                _measure(header, runs, turns, results, tell)
    rows = tuple(results.rows[key] for key in keys)
    return Report(
        cpu=cpu(),
        cores=len(os.sched_getaffinity(0)),
        turns=min(len(figure.turns) for row in rows for figure in row.figures),
        seconds=time.perf_counter() - began,
        rows=rows,
    )


Turn = Callable[[], list[float]]


def _cases(
    transports: Sequence[str], sizes: Sequence[int], opened: Mapping[str, Copy | Pair]
) -> Iterator[tuple[RowHeader, dict[str, Turn]]]:
    """What is measured, and by which contenders; the last one of each is ours."""
    for nbytes in sizes:
        count = max(1, min(_MOST_WRITES, _TURN_NBYTES // nbytes))
        for transport in transports:
            names = (_FLOORS.get(transport, transport), transport)
            header = RowHeader(
                key=f"bench/{transport}/{size(nbytes)}",
                unit="GB/s",
                amount=nbytes,
                group=f"bench, {transport}",
                size=nbytes,
            )
            yield header, {name: partial(opened[name].stream, nbytes, count) for name in names}
    for transport in transports:
        pairs = {name: opened[name] for name in (_FLOORS.get(transport, transport), transport)}
        trips = {name: one.trip for name, one in pairs.items() if isinstance(one, Pair)}
        yield RowHeader(key=f"bench/{transport}/one trip", unit="us"), trips


def _measure(
    header: RowHeader,
    runs: Mapping[str, Turn],
    turns: int,
    results: Results,
    tell: Callable[[str], object],
) -> None:
    ours = [*runs][-1]
    entries = [
        Entry(name=name, family="ours" if name == ours else "floor", run=run)
        for name, run in runs.items()
    ]
    for entry in entries:
        # The first ones pay for what is set up once.
        entry.run()
    what = header.key.partition("/")[2]
    take_turns(
        header,
        entries,
        turns,
        results,
        on_turn=lambda entry, turn: tell(f"{what}: {entry.name}, turn {turn} of {turns}"),
    )


class Copy:
    """One thread copies within one process: what nothing through memory is faster than by much."""

    name = "copy"

    def __init__(self) -> None:
        self.memory, self._target = _noise().copy(), np.zeros(_POOL, np.uint8)

    def stream(self, nbytes: int, count: int) -> list[float]:
        """Seconds of each of ``count`` blocks, in a list of one.

        Raises:
            ContenderError: other bytes have arrived.
        """
        self._target[: count * nbytes] = 0
        begin = time.perf_counter()
        for at in range(0, count * nbytes, nbytes):
            self._target[at : at + nbytes] = self.memory[at : at + nbytes]
        took = time.perf_counter() - begin
        _check(self.name, zlib.crc32(self._target[: count * nbytes].data), count * nbytes)
        return [took / count]

    def close(self) -> None:
        return


class _End(ABC):
    """One end of a link, which sends to the other and hears from it."""

    memory: Bytes

    @abstractmethod
    def address(self) -> Any:
        """How the other end reaches this one."""

    @abstractmethod
    def meet(self, address: Any) -> None: ...

    @abstractmethod
    def send(self, nbytes: int, count: int) -> None:
        """Sends blocks, each to another place; each is complete here afterwards."""

    @abstractmethod
    def receive(self, nbytes: int, count: int) -> Iterator[None]:
        """Yields when it is ready, and ends when all blocks have come."""

    @abstractmethod
    def ping(self) -> None:
        """Sends a few bytes."""

    @abstractmethod
    def pong(self) -> None:
        """Waits for them."""

    def take(self, nbytes: int, count: int) -> Iterator[Any]:
        """Answers when it is ready, then when all blocks had come, on the clock that all processes
        share, with their checksum."""
        self.memory[: nbytes * count] = 0
        yield from self.receive(nbytes, count)
        yield time.perf_counter(), zlib.crc32(self.memory[: nbytes * count].data)

    def echo(self) -> Iterator[None]:
        """Answers pings."""
        yield
        for _ in range(_PINGS):
            self.pong()
            self.ping()
        yield

    @abstractmethod
    def close(self) -> None: ...


class EngineEnd(_End):
    """An engine with a region and a counter: counted writes, all of them under way at once."""

    def __init__(self, name: str, transport: str, token: bytes) -> None:
        self._engine = TransferEngine(name=name, transport=transport, token=token)
        # Behind the blocks, where pings go.
        self._region = self._engine.alloc(_POOL + PING_NBYTES)
        self._counter = self._engine.counter()
        self._sent: list[Transfer] = []
        self.memory = self._region.numpy()[:_POOL]

    def address(self) -> tuple[RegionDescriptor, CounterRef]:
        return self._region.descriptor(), self._counter.ref

    def meet(self, address: tuple[RegionDescriptor, CounterRef]) -> None:
        self._there, self._ref = self._engine.import_region(address[0]), address[1]

    def send(self, nbytes: int, count: int) -> None:
        for write in [self._write(at, nbytes) for at in range(0, nbytes * count, nbytes)]:
            write.wait()

    def _write(self, at: int, nbytes: int) -> Transfer:
        near, there = self._region.slice(at, nbytes), self._there.slice(at, nbytes)
        return self._engine.write(near, there, imm=self._ref)

    def receive(self, nbytes: int, count: int) -> Iterator[None]:
        expected = self._counter.expect(count, timeout=_TIMEOUT_S)
        yield
        expected.wait()

    def ping(self) -> None:
        self._sent.append(self._write(_POOL, PING_NBYTES))

    def pong(self) -> None:
        self._counter.wait(1, timeout=_TIMEOUT_S)
        while self._sent:
            self._sent.pop().wait()

    def close(self) -> None:
        self._engine.close()


class SocketEnd(_End):
    """One TCP connection over the loopback interface, written and read by plain calls."""

    def __init__(self) -> None:
        self.memory = np.zeros(_POOL, np.uint8)
        self._bytes = memoryview(bytearray(PING_NBYTES))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(_TIMEOUT_S)

    def address(self) -> Any:
        return self._socket.getsockname()

    def meet(self, address: Any) -> None:
        """Connects to the address, or without one takes who connects."""
        with self._socket as listener:
            if address is None:
                self._socket, _ = listener.accept()
            else:
                self._socket = socket.create_connection(address, _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, nbytes: int, count: int) -> None:
        for at in range(0, nbytes * count, nbytes):
            self._socket.sendall(self.memory.data[at : at + nbytes])

    def receive(self, nbytes: int, count: int) -> Iterator[None]:
        yield
        for at in range(0, nbytes * count, nbytes):
            _receive(self._socket, self.memory.data[at : at + nbytes])

    def ping(self) -> None:
        self._socket.sendall(self._bytes)

    def pong(self) -> None:
        _receive(self._socket, self._bytes)

    def close(self) -> None:
        self._socket.close()


class Pair:
    """A link to a process of its own, measured from here.

    Args:
        name: ``socket``, or a transport as an engine names it.

    Raises:
        FabricError: the transport doesn't work here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        plain, token = name == "socket", secrets.token_bytes(16)
        # What this machine can't do is said here, before a process is started for it.
        self._near: _End = SocketEnd() if plain else EngineEnd("bench-near", name, token)
        self.memory = self._near.memory
        """What is sent."""
        self.memory[:] = _noise()
        kind, given = ("SocketEnd", ()) if plain else ("EngineEnd", ("bench-far", name, token))
        where = f"the other process of {name}"
        self._far = Child(f"{__name__}:{kind}", *given, name=where)
        try:
            self._far.end_call()
            # Of sockets one end listens.
            there: Any = None if plain else self._far.call("address")
            self._far.begin("meet", self._near.address())
            self._near.meet(there)
            self._far.end_call()
        except BaseException:
            self.close()
            raise

    def stream(self, nbytes: int, count: int) -> list[float]:
        """Seconds of each of ``count`` blocks, until the receiver knows that they are there.

        Raises:
            ContenderError: other bytes have arrived, or the other process has ended.
        """
        self._far.call("take", nbytes, count)
        begin = time.perf_counter()
        self._near.send(nbytes, count)
        end, arrived = self._far.end_call(_TIMEOUT_S)
        _check(self.name, arrived, count * nbytes)
        return [(end - begin) / count]

    def trip(self) -> list[float]:
        """Seconds of one trip of :data:`PING_NBYTES`, half of a round.

        Raises:
            ContenderError: the other process has ended.
        """
        self._far.call("echo")
        begin = time.perf_counter()
        for _ in range(_PINGS):
            self._near.ping()
            self._near.pong()
        took = time.perf_counter() - begin
        self._far.end_call(_TIMEOUT_S)
        return [took / _PINGS / 2]

    def close(self) -> None:
        # The other end hears that this one goes.
        self._near.close()
        self._far.close()


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


@lru_cache(maxsize=1)
def _noise() -> Bytes:
    """Bytes that no zeroes or earlier ones can be taken for."""
    return np.random.default_rng(0).integers(0, 256, _POOL, dtype=np.uint8)


def _check(name: str, arrived: int, nbytes: int) -> None:
    """Raises ContenderError if the checksum is another one than that of what was sent."""
    if zlib.crc32(_noise()[:nbytes].data) != arrived:
        raise ContenderError(f"{name}: the bytes that arrived are not those that were sent")
