"""No wait holds the GIL: other threads run Python meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import pytest

from fabric_ray import TransferEngine
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
