"""What a user does with an engine, in one process, over both transports."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fabric_ray import RegionDescriptor, TransferEngine
from fabric_ray.engine import Region, RemoteRegion
from fabric_ray.errors import EngineClosed, PeerError, PeerLost, TransferTimeout
from tests.processes import within

Pair = tuple[TransferEngine, TransferEngine]


def filled(engine: TransferEngine, nbytes: int) -> Region:
    region = engine.alloc(nbytes)
    region.numpy()[:] = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
    return region


def importing(engine: TransferEngine, region: Region) -> RemoteRegion:
    sent = pickle.dumps(region.descriptor())
    return engine.import_region(pickle.loads(sent))


def test_one_completion_seen_in_five_ways(pair: Pair) -> None:
    a, b = pair
    src, dst = filled(a, 4096), b.alloc(4096)
    counter = b.counter()
    waiting = counter.expect(1)
    flag = waiting.flag()
    called = threading.Event()
    seen = []
    waiting.add_done_callback(lambda t: (seen.append(t), called.set()))
    assert not flag
    assert not waiting.done()
    with pytest.raises(RuntimeError, match="not over"):
        waiting.result()
    with pytest.raises(TimeoutError, match="goes on"):
        waiting.wait(0.01)
    a.write(src, importing(a, dst), imm=counter.ref).wait(10)
    waiting.wait(10)
    within(10, "the flag", lambda: bool(flag))
    assert called.wait(10)
    assert seen == [waiting]
    waiting.result()
    late = threading.Event()
    waiting.add_done_callback(lambda _: late.set())
    assert late.wait(10)


def test_awaiting_lets_other_tasks_run(pair: Pair) -> None:
    a, b = pair
    src, dst = filled(a, 4096), b.alloc(4096)
    there, counter = importing(a, dst), b.counter()

    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            for _ in range(100):
                await asyncio.sleep(0.0005)
                turns += 1
            await a.write(src, there, imm=counter.ref)

        async def reader() -> int:
            await counter.expect(1)
            return turns

        return (await asyncio.gather(reader(), other()))[0]

    assert asyncio.run(main()) == 100


def test_an_await_that_waits_long_and_one_that_fails(pair: Pair) -> None:
    a, b = pair
    src, dst = filled(a, 64), b.alloc(64)
    there, counter = importing(a, dst), b.counter()

    async def main() -> None:
        late = asyncio.get_running_loop().call_later(
            0.05, lambda: a.write(src, there, imm=counter.ref)
        )
        await asyncio.wait_for(_future(counter.expect(1)), 10)
        assert late
        with pytest.raises(TransferTimeout, match="2 writes are missing"):
            await counter.expect(2, timeout=0.02)

    async def _future(transfer: object) -> None:
        await transfer  # type: ignore[misc]

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_group_that_has_lost_a_member_names_it_and_reaches_the_others(
    open_engine: Callable[..., TransferEngine], transport: str
) -> None:
    a, b, c = (open_engine(n, transport=transport) for n in "abc")
    src = filled(a, 200)
    regions = [engine.alloc(100) for engine in (b, c)]
    targets = [importing(a, region) for region in regions]
    group = a.peer_group([t.peer for t in targets])
    parts = [(t, 0, 100 * i, 100) for i, t in enumerate(targets)]
    a.scatter(src, parts, group=group, imm=3).wait(10)
    waiting = a.plain_counter(3).expect(1, writers=group.peers)
    b.close()
    with pytest.raises(PeerLost) as lost:
        waiting.wait(10)
    assert lost.value.peer == targets[0].peer.label
    assert isinstance(lost.value, ConnectionError)
    for begin in (lambda: a.scatter(src, parts, group=group, imm=3), lambda: a.barrier(group, 3)):
        with pytest.raises(PeerError) as gone:
            begin().wait(10)
        assert gone.value.peer == targets[0].peer.label
    c.plain_counter(3).wait(3, timeout=10)


def test_a_watcher_sees_stores_from_anywhere(open_engine: Callable[..., TransferEngine]) -> None:
    engine = open_engine()
    changes: list[tuple[int, int]] = []
    watcher = engine.watch(lambda old, new: changes.append((old, new)))
    watcher.store(5)
    within(5, "the first change", lambda: changes == [(0, 5)])
    np.asarray(watcher)[0] = 9
    within(5, "a plain store", lambda: changes[-1] == (5, 9))
    watcher.add(3)
    within(5, "an addition", lambda: changes[-1] == (9, 12))
    del watcher


def test_tensors_register_and_share_memory(pair: Pair) -> None:
    a, b = pair
    weights = torch.randn(64, 32).to(torch.bfloat16)
    target, region = b.empty((64, 32), torch.bfloat16)
    a.write(a.register(weights), importing(a, region)).wait(10)
    assert torch.equal(weights, target)
    foreign = torch.zeros(64, 32, dtype=torch.bfloat16)
    registered = b.register(foreign)
    a.write(a.register(weights), importing(a, registered)).wait(10)
    assert torch.equal(weights, foreign)
    inside = b.register(target[16:32])
    assert inside.mappable
    a.write(a.register(weights[:16]), importing(a, inside)).wait(10)
    assert torch.equal(target[16:32], weights[:16])


def test_buffers_of_all_kinds_register(pair: Pair) -> None:
    a, b = pair
    import array

    for buffer in (bytearray(b"x" * 80), array.array("d", range(10)), memoryview(bytearray(80))):
        region = a.register(buffer)
        assert region.nbytes == 80
        dst = b.alloc(80)
        a.write(region, importing(a, dst)).wait(10)
        assert dst.numpy().tobytes() == bytes(memoryview(buffer).cast("B"))


def test_an_expectation_keeps_its_counter(pair: Pair) -> None:
    a, b = pair
    dst, src = b.alloc(64), filled(a, 64)
    there = importing(a, dst)
    counter = b.counter()
    reference, waiting = counter.ref, counter.expect(1)
    del counter
    a.write(src, there, imm=reference).wait(10)
    waiting.wait(10)
    del waiting

    def seen() -> bool:
        # The thread that moves the engine at this moment drops the counter at the end of its round.
        a.write(src, there, imm=reference).wait(10)
        return b.counter().poll() == 0 and b.stats()["ghosts"] > 0

    within(10, "the ghost", seen)
    before = b.stats()["ghosts"]
    a.write(src, there, imm=reference).wait(10)
    within(10, "one more", lambda: b.counter().poll() == 0 and b.stats()["ghosts"] == before + 1)


def test_values_survive_pickling(pair: Pair) -> None:
    a, b = pair
    region, counter = b.alloc(100), b.counter()
    for value in (b.address, region.descriptor(), counter.ref):
        copy = pickle.loads(pickle.dumps(value))
        assert copy == value
        assert hash(copy) == hash(value)
        assert type(value).from_bytes(value.to_bytes()) == value
    part = region.descriptor().slice(10, 20)
    assert RegionDescriptor.from_bytes(part.to_bytes()).nbytes == 20
    there = a.import_region(part)
    a.write(filled(a, 20), there).wait(10)
    assert region.numpy()[10:30].any()
    assert not region.numpy()[30:].any()


def test_the_transport_is_visible_everywhere(open_engine: Callable[..., TransferEngine]) -> None:
    a, b, c = open_engine("a"), open_engine("b"), open_engine("c", transport="tcp")
    for other, transport in ((b, "shm"), (c, "tcp")):
        dst = other.alloc(64)
        there = importing(a, dst)
        a.write(filled(a, 64), there).wait(10)
        assert a.write(filled(a, 64), there).transport == transport
        explanation = a.explain(there.peer)
        assert explanation.transport == transport
        assert {v.transport: v.chosen for v in explanation.verdicts}[transport]
        assert all(v.reason for v in explanation.verdicts)
        assert any("; wire version 1; " in v.reason for v in explanation.verdicts if v.chosen)
    assert "not shm" in str(a.explain(a.peer(c.address)))
    assert {rail.transport for rail in a.rails()} >= {"shm", "tcp"}
    assert all(0 <= rail.under_way < rail.window for rail in a.rails())


def test_a_drained_engine_ends_what_it_has_begun_and_takes_nothing_new(pair: Pair) -> None:
    a, b = pair
    src, dst = filled(a, 1 << 20), b.alloc(1 << 20)
    remote = importing(a, dst)
    there, here = b.counter(), a.counter()
    transfer = a.write(src, remote, imm=there.ref)
    waiting = here.expect(1)
    drained = a.drain()
    with pytest.raises(EngineClosed, match="drained"):
        a.write(src, remote)
    with pytest.raises(EngineClosed, match="drained"):
        here.expect(1)
    transfer.wait(10)
    assert not drained.done()
    back = b.import_region(src.descriptor())
    b.write(dst, back, imm=here.ref).wait(10)
    waiting.wait(10)
    drained.wait(10)
    assert there.value == 1
    a.drain().wait(10)


def test_an_unknown_priority_is_named(pair: Pair) -> None:
    a, b = pair
    src, dst = filled(a, 8), b.alloc(8)
    with pytest.raises(ValueError, match="use 'latency'"):
        a.write(src, importing(a, dst), priority="urgent")  # type: ignore[arg-type]


# In a process of its own: a thread that waits while it holds the GIL can't be interrupted.
DROPPED = """
from contextlib import suppress
from pathlib import Path
from fabric_ray import TransferEngine

for _ in range(20):
    engine = TransferEngine(transport="shm")
    watcher = engine.watch(lambda old, new: sum(range(1000)))
    for n in range(50):
        watcher.add()
        engine.counter().expect(0).add_done_callback(lambda transfer: None)
    del engine, watcher
names = []
for task in Path("/proc/self/task").iterdir():
    with suppress(OSError):  # it has ended
        names.append((task / "comm").read_text().strip())
print("left:", [name for name in names if name in ("fabric-watcher", "fabric-callback")])
"""


def test_an_engine_that_is_dropped_unclosed_ends_while_its_callbacks_want_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "left: []\n"
