"""The program of each of many processes that start at once."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np

from fabric_ray import TransferEngine

PROCESSES = 8


def one_of_many(connection: Connection, transport: str, number: int) -> None:
    """Opens an engine as the others do, writes to each of them, and waits for what they write."""
    connection.send(None)
    connection.recv()
    with ExitStack() as stack:
        engine = stack.enter_context(
            TransferEngine(name=f"p{number}", transport=transport, token="t", op_timeout=120.0)
        )
        inbox, counter = engine.alloc(8 * PROCESSES), engine.counter()
        connection.send((inbox.descriptor(), counter.ref))
        offers = connection.recv()
        src = engine.alloc(8)
        src.numpy().view(np.uint64)[0] = number + 1
        writes = [
            engine.write(src, engine.import_region(d), 8, dst_offset=8 * number, imm=ref)
            for d, ref in offers
        ]
        for transfer in writes:
            transfer.wait()
        counter.wait(PROCESSES, timeout=120)
        connection.send((inbox.numpy().view(np.uint64).tolist(), counter.value))
        connection.recv()
