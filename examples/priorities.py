"""Many writes over one link: urgent ones overtake, late ones end, a slow reader holds its writers.

python examples/priorities.py
"""

import time

from fabric_ray import Batch, TransferEngine, errors
from fabric_ray.engine import Message

NBYTES, WRITES = 8 << 20, 32


def main() -> None:
    writer = TransferEngine(name="writer", transport="tcp", rail_window=1 << 20)
    reader = TransferEngine(name="reader", transport="tcp", receive_window=4 << 20)
    source, inbox = writer.alloc(NBYTES), reader.alloc(NBYTES)
    there = writer.import_region(inbox.descriptor())
    writer.write(source, there).wait()  # connected

    many = Batch()
    for _ in range(WRITES):
        many.write(source, there)
    began = time.perf_counter()
    bulk = writer.submit(many, priority="background")

    # What a caller waits for: behind one window at most, not behind everything.
    writer.write(source, there, 4096, priority="latency").wait()
    urgent = time.perf_counter() - began
    assert not bulk.done()

    # What is no use later than by its deadline.
    try:
        writer.write(source, there, priority="background", timeout=0.001).wait()
    except errors.TransferTimeout as late:
        print(f"given up, quiesced {late.quiesced}: {late}")
    bulk.wait()
    print(f"4 KiB arrived in {1e3 * urgent:.1f} ms")
    print(f"{WRITES * NBYTES >> 20} MiB arrived in {1e3 * (time.perf_counter() - began):.1f} ms")

    # Messages wait at their senders while the reader's pool is full.
    held: list[Message] = []
    reader.receive(held.append, count=2, max_nbytes=64)
    sent = [writer.send(there.peer, bytes([n])) for n in range(3)]
    sent[0].wait()
    sent[1].wait()
    time.sleep(0.05)
    assert not sent[2].done()
    held.clear()
    sent[2].wait()

    # Nothing new, and nothing is cut off.
    last = writer.write(source, there)
    writer.drain().wait()
    last.result()
    try:
        writer.write(source, there)
    except errors.EngineClosed as closed:
        print(closed)
    writer.close()
    reader.close()


if __name__ == "__main__":
    main()
