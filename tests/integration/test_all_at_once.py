"""Every public call from many threads at once, and many processes that start at once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabric_ray import Batch, Counter, Region, RemoteRegion, TransferEngine, pages
from fabric_ray.errors import Cancelled, FabricError
from tests.at_once import THREADS, at_once
from tests.integration.one_of_many import PROCESSES, one_of_many
from tests.processes import Other, within

ROUNDS = 2
BYTES = 4096


@dataclass
class World:
    """What all threads use, and what one thread has for itself."""

    a: TransferEngine
    b: TransferEngine
    inbox: Region
    there: RemoteRegion
    counter: Counter
    folder: Path
    plain: int
    """A number that no other thread counts by."""

    def own(self) -> tuple[Region, Region, RemoteRegion]:
        """A source of ours, memory of ``b``'s, and that as we reach it."""
        src, dst = self.a.alloc(BYTES), self.b.alloc(BYTES)
        return src, dst, self.a.import_region(dst.descriptor())


def write(w: World) -> None:
    w.a.write(w.a.alloc(BYTES), w.there, imm=w.counter.ref).wait()


def write_pages(w: World) -> None:
    src, _, there = w.own()
    order = pages(range(4), stride=1024)
    w.a.write_pages(1024, src, order, there, order).wait()


def read(w: World) -> None:
    w.a.read(w.there, w.a.alloc(BYTES)).wait()


def read_pages(w: World) -> None:
    order = pages([3, 1], stride=1024)
    w.a.read_pages(1024, w.there, order, w.a.alloc(BYTES), order).wait()


def scatter(w: World) -> None:
    src, _, there = w.own()
    group = w.a.peer_group([there.peer])
    w.a.scatter(src, [(there, 0, 0, 64)], group=group, imm=w.plain).wait()
    w.a.barrier(group, w.plain).wait()
    w.b.plain_counter(w.plain).wait(2)


def submit(w: World) -> None:
    src, _, there = w.own()
    batch = Batch()
    batch.write(src, there)
    w.a.prepare(batch).wait()
    w.a.explain(batch)
    w.a.submit(batch).wait()


def send(w: World) -> None:
    w.a.connect(w.there.peer)
    with suppress(FabricError):  # the pool may have been replaced
        w.a.send(w.a.peer(w.b.address), b"word", timeout=0.2).wait()


def receive(w: World) -> None:
    w.b.receive(lambda message: message.data, count=8, max_nbytes=64)


def messages(w: World) -> None:
    async def some() -> None:
        stream = w.b.messages(count=4)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        await stream.aclose()

    asyncio.run(some())


def register(w: World) -> None:
    array = np.zeros(BYTES, np.uint8)
    region = w.b.register(array)
    there = w.a.import_region(region.descriptor())
    w.a.write(w.a.alloc(BYTES), there).wait()
    region[:64].slice(0, 32).descriptor()
    region.revoke().wait()
    w.b.register(torch.zeros(64), segment=True).deregister()
    by_address = w.b.register_address(array.ctypes.data, array.nbytes)
    w.a.write(w.a.alloc(BYTES), w.a.import_region(by_address.descriptor())).wait()
    by_address.revoke().wait()


def empty(w: World) -> None:
    tensor, region = w.a.empty((4, 4), torch.float32)
    assert tensor.nbytes == region.nbytes
    assert region.tensor().nbytes == region.numpy().nbytes


def grant(w: World) -> None:
    granted = w.inbox.grant(0, 64, peer=w.a.address, ttl=60)
    w.a.write(w.a.alloc(64), w.a.import_region(granted.descriptor())).wait()
    granted.deregister()


def register_file(w: World) -> None:
    path = w.folder / f"{threading.get_ident()}"
    region = w.a.register_file(path, nbytes=BYTES, create=True)
    w.a.write(w.a.alloc(BYTES), w.a.import_region(region.descriptor())).wait()
    region.sync()


def segment(w: World) -> None:
    region = w.b.alloc(BYTES)
    there = w.a.open_segment(w.b.segment([region]).descriptor())
    batch = Batch()
    batch.write_segment(w.a.segment([w.a.alloc(64)]), 0, there, 0, 64)
    w.a.submit(batch).wait()


def expect(w: World) -> None:
    counter = w.b.counter()
    arrival = counter.expect(1, writers=[w.b.peer(w.a.address)])
    arrival.add_done_callback(lambda transfer: transfer.exception())
    flag = arrival.flag()
    w.a.write(w.a.alloc(64), w.there, 64, imm=counter.ref)
    arrival.wait()
    within(30, "the flag", lambda: bool(flag))
    assert arrival.done()
    assert counter.poll() == counter.value == 1


def cancel(w: World) -> None:
    arrival = w.b.counter().expect(1)
    arrival.cancel()
    with pytest.raises(Cancelled):
        arrival.wait()
    assert arrival.wait_quiesced(timeout=30)


def watch(w: World) -> None:
    seen = threading.Event()
    watcher = w.a.watch(lambda old, new: seen.set())
    watcher.store(1)
    assert seen.wait(30)
    value, ago = watcher.seen
    assert value == 1
    assert ago >= 0


def look(w: World) -> None:
    w.a.stats()
    w.a.metrics()
    w.a.records(w.a.records().cursor)
    w.a.rails()
    repr(w.a.explain(w.there.peer))
    assert w.a.id == w.a.address.id


CALLS: dict[str, Callable[[World], None]] = {
    "alloc": write,
    "barrier": scatter,
    "connect": send,
    "counter": expect,
    "empty": empty,
    "explain": look,
    "import_region": write,
    "messages": messages,
    "metrics": look,
    "open_segment": segment,
    "peer": send,
    "peer_group": scatter,
    "plain_counter": scatter,
    "prepare": submit,
    "rails": look,
    "read": read,
    "read_pages": read_pages,
    "receive": receive,
    "records": look,
    "register": register,
    "register_address": register,
    "register_file": register_file,
    "scatter": scatter,
    "segment": segment,
    "send": send,
    "stats": look,
    "submit": submit,
    "watch": watch,
    "write": write,
    "write_pages": write_pages,
}
OTHERS = [grant, cancel]
# They end the engine: one thread alone calls them, while the others go on.
LAST = {"close", "drain"}


def test_every_public_call_is_made() -> None:
    methods = {n for n in dir(TransferEngine) if not n.startswith("_")}
    methods = {n for n in methods if callable(getattr(TransferEngine, n))}
    assert methods == set(CALLS) | LAST


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ic_3_all_public_calls_from_32_threads_at_once(
    transport: str, open_engine: Callable[..., TransferEngine], tmp_path: Path
) -> None:
    a, b = (open_engine(n, transport=transport, op_timeout=120.0) for n in "ab")
    inbox, counter = b.alloc(BYTES), b.counter()
    b.receive(lambda message: None)
    there = a.import_region(inbox.descriptor())
    calls = [*set(CALLS.values()), *OTHERS]

    def work(number: int) -> None:
        world = World(a, b, inbox, there, counter, tmp_path, number)
        draw = random.Random(number)
        for _ in range(ROUNDS):
            for call in draw.sample(calls, len(calls)):
                call(world)

    at_once(work)
    counter.wait(THREADS * ROUNDS, timeout=60)
    assert counter.value == THREADS * ROUNDS


def test_closing_while_32_threads_call_ends_them_in_words(
    open_engine: Callable[..., TransferEngine], tmp_path: Path
) -> None:
    a, b = (open_engine(n, op_timeout=120.0) for n in "ab")
    inbox, counter = b.alloc(BYTES), b.counter()
    there = a.import_region(inbox.descriptor())
    begun = threading.Semaphore(0)

    def work(number: int) -> None:
        if number == 0:
            for _ in range(THREADS - 1):
                assert begun.acquire(timeout=120)
            a.drain()
            a.close()
            return
        world = World(a, b, inbox, there, counter, tmp_path, number)
        calls = [write, read, submit, write_pages, grant, look]
        draw = random.Random(number)
        with suppress(FabricError):
            while True:
                draw.choice(calls)(world)
                begun.release()

    at_once(work)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_eight_processes_that_start_at_once_all_reach_each_other(transport: str) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(Other(one_of_many, transport, i)) for i in range(PROCESSES)]

        def all_hear(timeout: float = 150.0) -> list[Any]:
            return [other.hear(timeout) for other in others]

        all_hear()
        for other in others:
            other.say("open")
        offers = all_hear()
        for other in others:
            other.say(offers)
        words = list(range(1, PROCESSES + 1))
        assert all_hear() == [(words, PROCESSES)] * PROCESSES
        for other in others:
            other.say("done")
