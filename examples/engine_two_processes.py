"""Two processes, one counted write between them, over shared memory and over tcp.

python examples/engine_two_processes.py
"""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from fabric_ray import TransferEngine

NBYTES = 64 << 20


def receiver(pipe: Connection, transport: str) -> None:
    with TransferEngine(name="receiver", transport=transport) as engine:
        inbox = engine.alloc(NBYTES)
        counter = engine.counter()
        # All that the sender needs: who we are comes with the descriptor.
        pipe.send((inbox.descriptor(), counter.ref))
        counter.wait(1)
        pipe.send(int(inbox.numpy().sum(dtype=np.uint64)))
        pipe.recv()  # the sender is done with us


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    for transport in ("shm", "tcp"):
        pipe, theirs = spawn.Pipe()
        other = spawn.Process(target=receiver, args=(theirs, transport))
        other.start()
        descriptor, counter = pipe.recv()
        with TransferEngine(name="sender", transport=transport) as engine:
            source = engine.alloc(NBYTES)
            source.numpy()[:] = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
            there = engine.import_region(descriptor)
            engine.write(source, there, imm=counter).wait()
            assert pipe.recv() == source.numpy().sum(dtype=np.uint64)
            print(f"{NBYTES >> 20} MiB arrived over {engine.explain(there.peer).transport}")
            pipe.send("bye")
        other.join()


if __name__ == "__main__":
    main()
