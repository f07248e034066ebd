"""A counter is all that a receiver is told. What it says, and what it doesn't.

Pages come early and in no order; an attempt is given up, and its late writes count for no attempt.

    python examples/counter_rounds.py
"""

import numpy as np

from fabric_ray import TransferEngine, errors

NBYTES = 1 << 20


def main() -> None:
    with TransferEngine(name="writer") as writer, TransferEngine(name="reader") as reader:
        inbox, source = reader.alloc(NBYTES), writer.alloc(NBYTES)
        there = writer.import_region(inbox.descriptor())
        known = [reader.peer(writer.address)]

        # Writes that came before they were expected are counted, and each is taken once.
        counter = reader.counter()
        for _ in range(3):
            writer.write(source, there, imm=counter.ref).wait()
        first, second = counter.expect(3), counter.expect(1, writers=known)
        first.wait()
        assert (counter.value, counter.unclaimed, second.done()) == (3, 0, False)
        writer.write(source, there, imm=counter.ref)
        second.wait()

        # An attempt has a counter of its own. When it is given up, the counter goes.
        attempt = reader.counter()
        late = attempt.ref  # what the writer of that attempt holds
        try:
            attempt.wait(1, writers=known, timeout=0.05)
        except errors.TransferTimeout as timeout:
            print(f"given up: {timeout.missing} write is missing after {timeout.after} s")
        del attempt
        again = reader.counter()
        writer.write(source, there, imm=late).wait()
        while reader.stats()["ghosts"] == 0:
            assert again.poll() == 0

        # The late bytes landed all the same: memory that is to be used again is revoked first.
        inbox.revoke().wait()
        fresh = reader.alloc(NBYTES)
        try:
            writer.write(source, there, imm=late).wait()
        except errors.Stale as stale:
            print(f"late again: {stale}")
        source.numpy()[:] = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
        writer.write(source, writer.import_region(fresh.descriptor()), imm=again.ref)
        again.wait(1, writers=known)
        assert np.array_equal(fresh.numpy(), source.numpy())
        print("the second attempt arrived, and nothing of the first was counted")


if __name__ == "__main__":
    main()
