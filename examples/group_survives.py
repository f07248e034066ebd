"""Four processes in step, round by round: one is killed, the others say who, and go on without it.

python examples/group_survives.py
"""

import multiprocessing
from itertools import count
from multiprocessing.connection import Connection

from fabric_ray import TransferEngine
from fabric_ray.errors import PeerError

RANKS, DOOMED, CHUNK = 4, 2, 1 << 16


def member(rank: int, pipe: Connection) -> None:
    with TransferEngine(name=f"rank-{rank}") as engine:
        inbox, source = engine.alloc(RANKS * CHUNK), engine.alloc(CHUNK)
        pipe.send(inbox.descriptor())
        theirs = {r: engine.import_region(d) for r, d in enumerate(pipe.recv()) if r != rank}
        for epoch in count():  # of the membership: what was in use when it changed is used up
            arrived, read = engine.plain_counter(2 * epoch), engine.plain_counter(2 * epoch + 1)
            try:
                group = engine.peer_group([there.peer for there in theirs.values()])
                while number := pipe.recv():
                    source.numpy()[:] = number
                    parts = [(there, rank * CHUNK, 0, CHUNK) for there in theirs.values()]
                    engine.scatter(source, parts, group=group, imm=2 * epoch)
                    arrived.wait(len(group), writers=group.peers)
                    sums = {r: int(inbox.numpy()[r * CHUNK :][:CHUNK].sum()) for r in theirs}
                    assert sums == dict.fromkeys(theirs, number * CHUNK)
                    engine.barrier(group, 2 * epoch + 1)  # we have read: they may write again
                    read.wait(len(group), writers=group.peers)
                    pipe.send(f"all of round {number} arrived from {list(theirs)}")
                return
            except PeerError as lost:
                theirs = {r: t for r, t in theirs.items() if t.peer.label != lost.peer}
                pipe.send(f"lost {lost.peer}")


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        pipe, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=member, args=(rank, theirs)))
        processes[-1].start()
        pipes.append(pipe)
    descriptors = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(descriptors)
    for number in (1, 2, 3, 4):
        if number == 3:
            processes.pop(DOOMED).kill()
            pipes.pop(DOOMED)
        for pipe in pipes:
            pipe.send(number)
        for rank, pipe in enumerate(pipes):
            print(f"round {number}, member {rank}: {pipe.recv()}")
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()


if __name__ == "__main__":
    main()
