"""A child by fork moves nothing of its parent's engines: it gets `ForkedEngine` (IC-3, MR-1)."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import ForkedEngine
from tests.processes import within

TRANSPORTS: list[dict[str, str]] = [{"transport": "tcp"}, {"transport": "shm"}, {}]
PATIENCE_S = 20


def in_child(act: Callable[[], object]) -> str:
    """What `act` returned or raised in a child by fork, as text."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            text = repr(act())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], PATIENCE_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        return answer.read().decode() if ready else "the child hangs"


class Pair:
    """An engine that writes to another one of this process, and counts what arrives."""

    def __init__(self, options: dict[str, str], open_engine: Callable[..., TransferEngine]) -> None:
        self.a, self.b = open_engine("a", **options), open_engine("b", **options)
        self.region = self.b.register(np.zeros(4096, "u1"))
        self.source = self.a.alloc(4096)
        self.there = self.a.import_region(self.region.descriptor())
        self.counter, self.idle = self.b.counter(), self.b.counter()
        self.written = 0
        self.write()

    def write(self, times: int = 1) -> None:
        """Writes, each of which must count exactly once."""
        for _ in range(times):
            self.written += 1
            self.source.numpy()[:8].view("u8")[:] = self.written
            self.a.write(self.source, self.there, imm=self.counter.ref).wait(10)
            self.counter.wait(1, timeout=10)
            assert self.counter.value == self.written
        time.sleep(0.02)
        assert self.counter.poll() == self.written, "a write counted twice"


@pytest.fixture(params=TRANSPORTS, ids=lambda o: o.get("transport", "any"))
def pair(request: pytest.FixtureRequest, open_engine: Callable[..., TransferEngine]) -> Pair:
    return Pair(request.param, open_engine)


def refused(*calls: Callable[[], object]) -> None:
    """Calls them for a while, as a loop that polls does; each must raise `ForkedEngine`."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        for number, call in enumerate(calls):
            with pytest.raises(ForkedEngine, match="open one engine per process"):
                print(f"call {number} returned {call()!r}")


def test_ic_3_a_child_that_polls_breaks_nothing(pair: Pair) -> None:
    pending = pair.idle.expect(1, timeout=60)
    calls = (
        pair.counter.poll,
        lambda: pair.counter.value,
        lambda: pair.counter.unclaimed,
        lambda: pair.counter.wait(1, timeout=0.1),
        pending.done,
        lambda: pending.wait(0.1),
        pending.result,
        lambda: asyncio.run(asyncio.wait_for(_wait_for(pending), 1)),
        lambda: pair.a.write(pair.source, pair.there, imm=pair.counter.ref),
        lambda: pair.a.read(pair.there, pair.source),
        lambda: pair.a.send(pair.there.peer, b"from the child"),
        pair.b.metrics,
        pair.b.records,
        pair.b.rails,
        pair.b.drain,
        lambda: pair.a.alloc(64),
        pair.region.deregister,
    )
    assert in_child(lambda: refused(*calls)) == "None"
    pair.write(5)


async def _wait_for(transfer: Any) -> None:
    await transfer


def test_ic_3_writes_count_once_while_a_child_polls(pair: Pair) -> None:
    if (child := os.fork()) == 0:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            try:
                pair.counter.poll()
            except ForkedEngine:
                continue
        os._exit(0)
    pair.write(200)
    os.waitpid(child, 0)
    pair.write(5)


def test_what_is_over_at_the_fork_is_over_in_the_child(pair: Pair) -> None:
    done = pair.a.write(pair.source, pair.there)
    done.wait(10)
    assert in_child(lambda: (done.done(), done.exception())) == "(True, None)"


def test_a_callback_of_the_child_hears_that_it_is_forked(pair: Pair) -> None:
    pending = pair.idle.expect(1, timeout=60)
    heard: list[str] = []

    def ask() -> list[str]:
        pending.add_done_callback(lambda t: heard.append(type(t.exception()).__name__))
        assert bool(pending.flag())
        return heard

    assert in_child(ask) == "['ForkedEngine']"


def test_mr_1_what_a_child_drops_or_closes_stays_with_its_parent(pair: Pair) -> None:
    """Objects die in the child by hand, with their engine, and as the interpreter ends."""
    watcher = pair.a.watch(lambda old, new: None)
    pending = [pair.idle.expect(1, timeout=60)]
    message: list[object] = []
    pair.b.receive(message.append, count=1)
    pair.a.send(pair.there.peer, b"hello").wait(10)
    held: dict[str, object] = dict(vars(pair), watcher=watcher, pending=pending, message=message)

    def drop() -> str:
        pair.a.close()
        pair.b.close()
        with pytest.raises(ForkedEngine):
            watcher.store(5)
        vars(pair).clear()
        held.clear()
        pending.clear()
        message.clear()
        gc.collect()
        return "dropped"

    assert in_child(drop) == "'dropped'"
    pair.write(5)
    watcher.store(1)
    watcher.add(1)
    assert watcher.value == 2
    message.clear()
    pair.a.send(pair.there.peer, b"hello").wait(10)
    other = pair.b.register(np.zeros(64, "u1"))
    other.deregister()


def test_a_child_opens_its_own_engine(pair: Pair) -> None:
    there = pair.b.address

    def talk() -> str:
        with TransferEngine() as own:
            source, region = own.alloc(4096), own.import_region(pair.region.descriptor())
            own.write(source, region, imm=pair.counter.ref).wait(10)
            return str(own.explain(own.peer(there)).transport is not None)

    assert in_child(talk) == "'True'"
    pair.written += 1
    pair.counter.wait(1, timeout=10)
    pair.write(5)


class Tracked(np.ndarray):  # type: ignore[type-arg]
    """Memory that a weak reference can follow."""


def test_a_child_lets_go_of_what_its_own_engine_kept(pair: Pair) -> None:
    pair.b.register(np.zeros(64, "u1")).deregister()  # the parent has released something

    def release() -> str:
        with TransferEngine() as own:
            array = np.zeros(64, "u1").view(Tracked)
            followed = weakref.ref(array)
            own.register(array).deregister()
            del array
            within(10, "the release", lambda: followed() is None)
        return "released"

    assert in_child(release) == "'released'"


def _work(pair: Pair, answers: Any) -> None:
    try:
        answers.put(pair.counter.poll())
    except ForkedEngine as error:
        answers.put(type(error).__name__)
    # The end of the process follows, with all that `multiprocessing` and the interpreter do then.


def test_multiprocessing_by_fork(pair: Pair) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    worker = context.Process(target=_work, args=(pair, answers))
    worker.start()
    worker.join(PATIENCE_S)
    assert worker.exitcode == 0
    assert answers.get() == "ForkedEngine"
    pair.write(5)


def test_a_command_with_something_to_do_before(pair: Pair) -> None:
    def before() -> None:
        with pytest.raises(ForkedEngine):
            pair.counter.poll()

    command = [sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, preexec_fn=before, capture_output=True, timeout=60)
    assert done.stdout == b"ran\n", done.stderr
    pair.write(5)


_ENDS = """
import numpy, os, sys
from fabric_ray import TransferEngine

a, b = TransferEngine(), TransferEngine()
region, source = b.register(numpy.zeros(4096, "u1")), a.alloc(4096)
there, counter = a.import_region(region.descriptor()), b.counter()
a.write(source, there, imm=counter.ref).wait(10)
counter.wait(1, timeout=10)
if os.fork() == 0:
    sys.exit(0)
_, status = os.wait()
assert status == 0, status
for n in range(2, 7):
    a.write(source, there, imm=counter.ref).wait(10)
    counter.wait(1, timeout=10)
    assert counter.value == n
print("all counted")
"""


def test_a_child_whose_interpreter_ends() -> None:
    """Not by `os._exit`: with what is registered at exit, and with all objects."""
    command = [sys.executable, "-c", _ENDS]
    done = subprocess.run(command, capture_output=True, timeout=60, text=True)
    assert (done.stdout, done.returncode) == ("all counted\n", 0), done.stderr


def test_workers_of_a_data_loader(pair: Pair) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Samples(data.Dataset):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.pair = pair

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> str:
            try:
                return str(self.pair.counter.poll())
            except ForkedEngine as error:
                return type(error).__name__

    loader = data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork")
    assert [item for batch in loader for item in batch] == ["ForkedEngine"] * 4
    pair.write(5)


def test_files_of_a_parent(tmp_path: Any, open_engine: Callable[..., TransferEngine]) -> None:
    a = open_engine("a")
    file = a.register_file(tmp_path / "spilled", nbytes=4096, create=True)
    memory = a.alloc(4096)
    there = a.import_region(file.descriptor())
    a.write(memory, there).wait(10)

    def drop() -> None:
        nonlocal a, file, memory, there
        with pytest.raises(ForkedEngine):
            a.write(memory, there)
        with pytest.raises(ForkedEngine):
            file.sync()
        a.close()
        del a, file, memory, there
        gc.collect()

    assert in_child(drop) == "None"
    memory.numpy()[:] = 7
    a.write(memory, there).wait(10)
    assert (tmp_path / "spilled").read_bytes() == bytes([7]) * 4096


@pytest.mark.parametrize("throughput", [False, True])
def test_a_rank_of_an_exchange_is_its_parents(throughput: bool) -> None:
    """Dropping or closing it in a child waits for no thread that isn't there."""
    torch = pytest.importorskip("torch")
    from fabric_ray.moe import AllToAll, ThroughputAllToAll

    sizes: dict[str, Any] = {"ranks": 1, "experts": 4, "topk": 2, "max_tokens": 8, "hidden": 16}
    engine = TransferEngine(name="rank-0", transport="shm")
    x, experts = torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]])
    weights: dict[str, Any] = {}
    rank: Any
    if throughput:
        rank = ThroughputAllToAll(engine, rank=0, ranks_per_node=1, **sizes)
        weights = {"weights": torch.ones(2, 2)}
    else:
        rank = AllToAll(engine, rank=0, **sizes)
    rank.connect([rank.descriptor()])

    def drop() -> None:
        nonlocal rank, engine
        engine.close()
        del rank, engine
        gc.collect()

    assert in_child(drop) == "None"
    rank.dispatch_send(x, experts, **weights)
    assert rank.dispatch_recv() is not None
    engine.close()
