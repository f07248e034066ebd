"""Connections between two engines are broken in the middle of writes: all arrive, and count once.

python examples/failover_tcp.py
"""

import contextlib
import os
import socket
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from fabric_ray import TransferEngine

NBYTES, WRITES, EVERY = 4 << 20, 200, 40


def break_a_connection(number: int) -> None:
    """Shut one TCP socket of this process down for both ends, as a reset on the way would."""
    connected = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):
            if not Path(f"/proc/self/fd/{name}").is_socket():
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            with contextlib.suppress(OSError):
                if found.family == socket.AF_INET and found.getpeername():
                    connected.append(found)
                    continue
            found.close()
    with contextlib.suppress(OSError):
        connected[number % len(connected)].shutdown(socket.SHUT_RDWR)
    for found in connected:
        found.close()


def main() -> None:
    with (
        TransferEngine(name="sender", transport="tcp") as sender,
        TransferEngine(name="receiver", transport="tcp") as receiver,
    ):
        source, inbox = sender.alloc(NBYTES), receiver.alloc(NBYTES)
        there = sender.import_region(inbox.descriptor())
        counter = receiver.counter()
        rng = np.random.default_rng(0)
        calm: list[float] = []
        broken: list[float] = []
        for number in range(WRITES):
            source.numpy()[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
            breaks = number % EVERY == EVERY // 2
            if breaks:
                threading.Timer(0.0005, break_a_connection, [number // EVERY]).start()
            began = time.perf_counter()
            sender.write(source, there, imm=counter.ref).wait()
            (broken if breaks else calm).append((time.perf_counter() - began) * 1e3)
            assert np.array_equal(source.numpy(), inbox.numpy())
            time.sleep(0.01)
        counter.wait(WRITES)
        assert counter.value == WRITES
    print(f"{WRITES} writes of {NBYTES >> 20} MiB arrived, and counted {WRITES}")
    print(f"in peace: {statistics.median(calm):.1f} ms")
    print(f"with a connection broken: {', '.join(f'{ms:.1f}' for ms in broken)} ms")


if __name__ == "__main__":
    main()
