"""No wait holds the GIL, and no object of Python's ends under a lock of the engine."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import EngineClosed
from tests.processes import Other

COUNTS = 1_000_000
HOURS = 36_000.0


def count_beside(
    connection: Connection, wait: Callable[[], object], end: Callable[[], object]
) -> None:
    """Counts while another thread waits for what only comes after that, and says how far."""
    begins, over = threading.Event(), threading.Event()

    def waits() -> None:
        begins.set()
        wait()
        over.set()

    waiting = threading.Thread(target=waits, daemon=True)
    waiting.start()
    begins.wait()
    n = 0
    while n < COUNTS and not over.is_set():
        n += 1
    connection.send(n)
    end()
    waiting.join()
    connection.send("over")


def counter_wait(connection: Connection) -> None:
    with TransferEngine(name="a") as a, TransferEngine(name="b") as b:
        counter, inbox = b.counter(), b.alloc(8)
        there = a.import_region(inbox.descriptor())
        write = partial(a.write, a.alloc(8), there, imm=counter.ref)
        count_beside(connection, partial(counter.wait, 1, timeout=HOURS), write)


def transfer_wait(connection: Connection) -> None:
    with TransferEngine(name="a") as a, TransferEngine(name="b") as b:
        counter, inbox = b.counter(), b.alloc(8)
        there = a.import_region(inbox.descriptor())
        arrival = counter.expect(1, timeout=HOURS)
        write = partial(a.write, a.alloc(8), there, imm=counter.ref)
        count_beside(connection, partial(arrival.wait, HOURS), write)


def exchange_wait(connection: Connection) -> None:
    import torch

    from fabric_ray.moe import AllToAll

    sizes = {"ranks": 2, "experts": 2, "topk": 1, "hidden": 16, "max_tokens": 1}
    with TransferEngine(name="0") as first, TransferEngine(name="1") as second:
        alls = [AllToAll(e, rank=r, timeout=600.0, **sizes) for r, e in enumerate((first, second))]
        descriptors = [a.descriptor() for a in alls]
        for a in alls:
            a.connect(descriptors)
        token = torch.zeros(1, 16, dtype=torch.bfloat16), torch.tensor([[0]])
        alls[0].dispatch_send(*token)
        count_beside(connection, alls[0].dispatch_recv, lambda: alls[1].dispatch_send(*token))


@pytest.mark.parametrize("waiting", [counter_wait, transfer_wait, exchange_wait])
def test_another_thread_counts_while_one_waits(waiting: Callable[[Connection], None]) -> None:
    # A wait that held the GIL would never end: the counting thread ends it.
    with Other(waiting) as other:
        assert other.hear(120) == COUNTS
        assert other.hear(60) == "over"


STILL = 20_000


def writer_that_stops(connection: Connection) -> None:
    """Maps the memory it is told of, and says what it has."""
    with TransferEngine(name="b") as b:
        there = b.import_region(connection.recv())
        own = b.alloc(8)
        b.write(own, there).wait()
        connection.send(own.descriptor())
        connection.recv()


def lock_wait(connection: Connection, what: str) -> None:
    a = TransferEngine(name="a")
    own, counter = a.alloc(8), a.counter()
    connection.send(own.descriptor())
    descriptor = connection.recv()
    peer, transfer = a.peer(descriptor.owner), a.write(own, a.import_region(descriptor))
    call: Callable[[], object] = {
        "peer": lambda: a.peer(descriptor.owner),
        "import_region": lambda: a.import_region(descriptor),
        "peer_group": lambda: a.peer_group([peer]),
        "connect": lambda: a.connect(peer),
        "explain": lambda: a.explain(peer),
        "expect": lambda: counter.expect(1, writers=[peer]),
        "transport": lambda: transfer.transport,
    }[what]
    calls, over = [0], threading.Event()

    def repeats() -> None:
        while not over.is_set():
            calls[0] += 1
            with contextlib.suppress(EngineClosed):
                call()

    # Holds the engine's lock while it waits for the peer that has stopped.
    closing = threading.Thread(target=a.close)
    repeating = threading.Thread(target=repeats, daemon=True)
    repeating.start()
    closing.start()
    # How often this thread sees that the other one is in the same call. That one would have the GIL
    # many times meanwhile if it waited for nothing else.
    sys.setswitchinterval(1e-4)
    n = seen = 0
    while n < STILL and closing.is_alive():
        n = n + 1 if calls[0] == seen else 0
        seen = calls[0]
    over.set()
    connection.send(n)


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    ["peer", "import_region", "peer_group", "connect", "explain", "expect", "transport"],
)
def test_another_thread_counts_while_one_waits_for_the_lock_of_the_engine(what: str) -> None:
    for _ in range(8):
        with Other(lock_wait, what) as waiting, Other(writer_that_stops) as writer:
            descriptor = writer.ask(waiting.hear(120), 120)
            writer.signal(signal.SIGSTOP)
            if waiting.ask(descriptor, 120) == STILL:
                return
    pytest.fail("no thread counted while one waited")


class CallsAtItsEnd:
    """An object that an engine keeps, and whose end calls that engine, as Python code that runs at
    the end of an object may, or code of other threads that have their turn then."""

    def __init__(self, engine: TransferEngine, ended: threading.Event) -> None:
        self.engine, self.ended = engine, ended

    def __call__(self, *_: object) -> None:
        pass

    def __del__(self) -> None:
        with contextlib.suppress(EngineClosed):
            self.engine.receive(print)
            self.engine.watch(print)
            self.engine.alloc(8).deregister()
        self.ended.set()


class OwnedArray(np.ndarray):  # type: ignore[type-arg]
    owner: CallsAtItsEnd


def end_in(what: str, ended: threading.Event) -> None:
    engine = TransferEngine(name="e")
    if what == "a handler of messages":
        engine.receive(CallsAtItsEnd(engine, ended))
        engine.receive(print)
    elif what == "a watcher":
        engine.watch(CallsAtItsEnd(engine, ended))
    elif what == "a watcher of an engine that closes":
        watcher = engine.watch(CallsAtItsEnd(engine, ended))
        engine.close()
        del watcher
    elif what == "a callback that was called":
        engine.counter().expect(0).add_done_callback(CallsAtItsEnd(engine, ended))
    elif what == "a callback of an engine that closes":
        arrival = engine.counter().expect(1)
        arrival.add_done_callback(CallsAtItsEnd(engine, ended))
        engine.close()
        del arrival
    else:
        array = np.zeros(64, np.uint8).view(OwnedArray)
        array.owner = CallsAtItsEnd(engine, ended)
        engine.register(array).deregister()
        del array
    assert ended.wait(60), "the object is kept"
    engine.close()


def objects_that_end(connection: Connection, what: str) -> None:
    ended = threading.Event()
    end_in(what, ended)
    gc.collect()
    connection.send("over")


@pytest.mark.parametrize(
    "what",
    [
        "a handler of messages",
        "a watcher",
        "a watcher of an engine that closes",
        "a callback that was called",
        "a callback of an engine that closes",
        "registered memory",
    ],
)
def test_what_the_engine_keeps_may_call_it_at_its_end(what: str) -> None:
    # In another process: under a lock it would wait for itself, with the GIL.
    with Other(objects_that_end, what) as other:
        assert other.hear(120) == "over"
