"""GPUs on the processor whose streams run behind the host, each on its own, in any order.

What is launched is queued by stream, and threads carry it out later. Only a stream's own order,
events and waits of the host order it, as on a GPU. A seed chooses which stream runs first where
several can, and how far the host runs ahead; kernels run on the processor
(:mod:`tests.host_kernels`), tensors are those of :mod:`tests.queued_tensors`.
"""

from __future__ import annotations

import ctypes
import enum
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.host_kernels import Host
from tests.stream_memory import StreamMemory

#: Seconds after which a task that runs is taken to wait for a peer: another stream runs beside it.
BESIDE = 1e-3
#: Seconds that the host must launch nothing before streams run, unless it waits for one.
QUIET = (0.0, 2e-3, 8e-3)
LIMIT = 60.0


class Wait(enum.IntEnum):
    """What the host waits for."""

    NOTHING = 0
    STREAM = 1
    DEVICE = 2


class HostWaits(Exception):
    """The host waits for a device in a call that may not."""


class Unordered(Exception):
    """A capture that CUDA refuses: streams that don't belong to it, or don't end in it."""


@dataclass(eq=False)
class Marker:
    """A place in a stream, as an event has it."""

    graph: CapturedGraph | None = None
    over: bool = False
    awaited: bool = False


@dataclass
class Task:
    """Something to run, a place to reach, or a place to wait for."""

    run: Callable[[Stream], None] | None = None
    reaches: Marker | None = None
    after: Marker | None = None
    of_memory: bool = False
    """Keeps account of memory alone: no capture has it."""


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: QueuedDevice) -> None:
        self.on = device
        self.device = device.device
        self.graph: CapturedGraph | None = None
        self.queue: deque[Task] = deque()
        self.running: Task | None = None
        self._pool = ThreadPoolExecutor(1)
        self._kernels: Host | None = None
        self.memory = StreamMemory(self)
        with device.changed:
            device.streams.append(self)

    def launch(self, run: Callable[[Stream], None], *, of_memory: bool = False) -> None:
        """Queues something to run; it learns on which stream."""
        self.add(Task(run=run, of_memory=of_memory))

    def add(self, task: Task) -> None:
        if self.graph is not None:
            self.graph.nodes.append((self, task))
            return
        with self.on.changed:
            self.queue.append(task)
            self.on.launched = time.monotonic()
            self.on.changed.notify_all()

    def mark(self, *, of_memory: bool = False) -> Marker:
        marker = Marker(self.graph)
        self.add(Task(reaches=marker, of_memory=of_memory))
        return marker

    def wait(self, marker: Marker) -> None:
        """What follows here runs after the place was reached."""
        marker.awaited = True
        if marker.graph is not self.graph:
            if self.graph is not None or marker.graph is None or not marker.graph.is_open:
                raise Unordered("a captured stream and one that isn't wait for each other")
            self.graph = marker.graph
        self.add(Task(after=marker))

    def wait_event(self, event: Event) -> None:
        if event.marker is not None:
            self.wait(event.marker)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.on.wait_for([self], Wait.STREAM, "Stream.synchronize")

    def run(self, task: Task) -> None:
        """Carries a task out in this stream's thread."""
        self.running = task
        self._pool.submit(self._run, task)

    def _run(self, task: Task) -> None:
        try:
            assert task.run is not None
            task.run(self)
        except BaseException as error:
            self.on.errors.append(error)
        with self.on.changed:
            self.running = None
            self.on.changed.notify_all()

    def kernels(self) -> Host:
        """Kernels with memory of their own, as a launch needs that runs beside others."""
        if self._kernels is None:
            self._kernels = self.on.host.another()
        return self._kernels

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, **_: bool) -> None:
        self.marker: Marker | None = None
        self.stream: Stream | None = None

    @property
    def device(self) -> torch.device:
        assert self.stream is not None, "the event was never recorded"
        return self.stream.device

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or torch.cuda.current_stream()
        self.marker = self.stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.marker is None or self.marker.over

    def synchronize(self) -> None:
        if self.marker is not None and self.stream is not None:
            marker = self.marker
            self.stream.on.host_waits(lambda: marker.over, Wait.STREAM, "Event.synchronize")


@dataclass(eq=False)
class CapturedGraph:
    """What streams were given while they were captured."""

    origin: Stream
    nodes: list[tuple[Stream, Task]] = field(default_factory=list)
    is_open: bool = True
    beside: dict[Stream, Stream] = field(default_factory=dict)
    """The streams of replays for those that joined the capture."""

    def end(self) -> None:
        """
        Raises:
            Unordered: a stream that joined has tasks that the first one doesn't wait for.
        """
        self.release()
        last = {stream: task for stream, task in self.nodes if not task.of_memory}
        for stream, task in last.items():
            ends = task.reaches is not None and task.reaches.awaited
            if stream is not self.origin and not ends:
                raise Unordered("a captured stream isn't waited for when its capture ends")

    def release(self) -> None:
        """Ends the capture of all its streams."""
        self.is_open = False
        for stream in self.origin.on.streams:
            if stream.graph is self:
                stream.graph = None

    def replay(self) -> None:
        """Queues everything again, behind what torch's current stream has been given."""
        now = self.origin.on.current
        markers: dict[Marker, Marker] = {}
        for captured, task in self.nodes:
            stream = now
            if captured is not self.origin:
                if captured not in self.beside:
                    self.beside[captured] = Stream(now.on)
                stream = self.beside[captured]
            if task.run is not None:
                stream.launch(task.run)
            elif task.reaches is not None:
                markers[task.reaches] = stream.mark()
            elif task.after is not None:
                stream.wait(markers[task.after])


class QueuedDevice:
    """One GPU, as a launcher, too."""

    def __init__(self, gpus: QueuedGpus, index: int, host: Host, seed: int) -> None:
        self.device, self.host = torch.device("cuda", index), host
        self.changed = gpus.changed
        self._gpus = gpus
        self._dice = random.Random(seed * 31 + index)
        self._quiet = self._dice.choice(QUIET)
        self._order = seed % 3
        self._favourite: Stream | None = None
        self.streams: list[Stream] = []
        self.default = Stream(self)
        self.launched = 0.0
        self.errors: list[BaseException] = []
        self.unexpected: list[str] = []
        """Waits of the host that its calls may not have, each with its stack."""
        self._hosts = 0
        self._closed = False
        self._scheduler = threading.Thread(target=self._schedule, daemon=True)
        self._scheduler.start()

    @property
    def current(self) -> Stream:
        """This thread's current stream here."""
        return self._gpus.of_thread.streams.get(self.device, self.default)

    def launch(
        self,
        file: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
        *,
        together: bool = False,
    ) -> None:
        given = type(arguments).from_buffer_copy(arguments)

        def run(stream: Stream) -> None:
            kernels = stream.kernels()
            kernels.launch(file, kernel, blocks, threads, given, together=together)

        self.current.launch(run)

    def resident(self, file: str, kernel: str, threads: int) -> int:
        return self.current.kernels().resident(file, kernel, threads)

    def wait_for(self, streams: list[Stream], kind: Wait, what: str) -> None:
        """The host waits until streams have run what they were given."""
        if any(stream.graph is not None for stream in streams):
            self._refuse(f"{what} can't be captured")
        given = [stream.mark() for stream in streams]
        self.host_waits(lambda: all(marker.over for marker in given), kind, what)

    def host_waits(self, over: Callable[[], bool], kind: Wait, what: str) -> None:
        if self.current.graph is not None:
            self._refuse(f"{what} can't be captured")
        if kind > self._gpus.of_thread.may_wait:
            self._refuse(f"{what} waits for a {kind.name.lower()}")
        with self.changed:
            self._hosts += 1
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: over() or self.errors, LIMIT)
            self._hosts -= 1
        assert came, f"{what}: a stream hangs"
        self.check()

    def _refuse(self, what: str) -> None:
        self.unexpected.append(f"{what}:\n{''.join(traceback.format_stack(limit=12)[:-2])}")
        raise HostWaits(what)

    def check(self) -> None:
        """Raises what a task raised."""
        if self.errors:
            raise self.errors[0]

    def _schedule(self) -> None:
        """Runs the stream that the seed prefers of those that can; another one beside it only once
        it seems to wait for a peer."""
        began = 0.0
        with self.changed:
            while not self._closed:
                while self._reach():
                    pass
                ready = [s for s in self.streams if s.queue and s.queue[0].run and not s.running]
                now = time.monotonic()
                held = 0.0 if self._hosts else self.launched + self._quiet - now
                if any(stream.running for stream in self.streams):
                    held = max(held, began + BESIDE - now)
                if not ready or held > 0:
                    self.changed.wait(held if ready else None)
                    continue
                stream = self._choose(ready)
                stream.run(stream.queue.popleft())
                began = now

    def _reach(self) -> bool:
        """Does what only orders streams, where it is next; whether there was any."""
        found = False
        for stream in self.streams:
            while stream.queue and not stream.running:
                task = stream.queue[0]
                if task.run is not None or (task.after is not None and not task.after.over):
                    break
                if task.reaches is not None:
                    task.reaches.over = True
                stream.queue.popleft()
                found = True
        if found:
            self.changed.notify_all()
        return found

    def _choose(self, ready: list[Stream]) -> Stream:
        if self._order < 2:
            return ready[-1 if self._order else 0]  # the newest one, or the oldest
        if self._favourite not in ready or self._dice.random() < 0.1:
            self._favourite = self._dice.choice(ready)
        assert self._favourite is not None
        return self._favourite

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        for stream in self.streams:
            stream.close()


class _OfThread(threading.local):
    """What CUDA keeps for each thread."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[torch.device, Stream] = {}
        self.may_wait = Wait.DEVICE


class QueuedGpus:
    """The GPUs of a process, in place of those of ``torch.cuda``.

    Args:
        seed: chooses the order between streams, and how far the host runs ahead.
    """

    def __init__(self, count: int, host: Host, seed: int) -> None:
        self.changed = threading.Condition()
        self.of_thread = _OfThread()
        self.gpus = [QueuedDevice(self, i, host, seed) for i in range(count)]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts these into ``torch.cuda``."""
        for name, what in {
            "is_available": lambda: True,
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self.of_thread.index,
            "current_stream": lambda device=None: self.of(device).current,
            "Stream": lambda device=None, **_: Stream(self.of(device)),
            "Event": Event,
            "device": self.device,
            "stream": self.stream,
            "is_current_stream_capturing": lambda: self.of(None).current.graph is not None,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(torch.cuda, name, what)

    def of(self, device: Any) -> QueuedDevice:
        """A GPU; the current one if ``None``."""
        index = device if isinstance(device, int | None) else torch.device(device).index
        return self.gpus[self.of_thread.index if index is None else index]

    def synchronize(self, device: Any = None) -> None:
        on = self.of(device)
        on.wait_for([*on.streams], Wait.DEVICE, "torch.cuda.synchronize")

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.of_thread.index = self.of_thread.index, self.gpus.index(self.of(device))
        try:
            yield
        finally:
            self.of_thread.index = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        streams = self.of_thread.streams
        before = stream.on.current
        streams[stream.device] = stream
        try:
            with self.device(stream.device):
                yield
        finally:
            streams[stream.device] = before

    @contextmanager
    def may_wait(self, kind: Wait) -> Iterator[None]:
        """What is called in it is documented to wait for a stream, or for the device."""
        before, self.of_thread.may_wait = self.of_thread.may_wait, kind
        try:
            yield
        finally:
            self.of_thread.may_wait = before

    @contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """As ``torch.cuda.graph``: a stream of its own is captured."""
        with self.may_wait(Wait.DEVICE):
            self.synchronize()
        origin = Stream(self.of(None))
        graph = origin.graph = CapturedGraph(origin)
        try:
            with self.stream(origin):
                yield graph
        except BaseException:
            graph.release()
            raise
        graph.end()

    def close(self) -> None:
        """
        Raises:
            BaseException: what a task raised.
            HostWaits: a call waited that may not; the text has the stacks.
        """
        with ExitStack() as stack:
            for gpu in self.gpus:
                stack.callback(gpu.close)
                stack.callback(self.synchronize, gpu.device)
            if unexpected := [one for gpu in self.gpus for one in gpu.unexpected]:
                raise HostWaits("\n".join(unexpected))
