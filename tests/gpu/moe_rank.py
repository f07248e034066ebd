"""One rank of exchanges, one case after the other, in a process or a thread of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from fabric_ray import TransferEngine
from tests.exchange_cases import Case, Exchange
from tests.stands import Stand


def orphan(this: Exchange, seed: int) -> torch.Tensor:
    """The sums after a replay of the graph, when its exchange is gone."""
    this.a.close()
    del this.a
    gc.collect()
    this.give(seed)
    this.replay()
    this.stand.finish()
    return this.sums.cpu()


def serve(
    connection: Connection,
    rank: int,
    ranks: int,
    transport: str,
    make_stand: Callable[[], Stand],
    timeout: float,
) -> None:
    """Answers until it is told to stop, or killed. What goes wrong in a case is its answer."""
    this: Exchange | None = None
    stand = make_stand()
    with TransferEngine(name=f"rank-{rank}", transport=transport, token=b"gpu") as engine:
        while True:
            match connection.recv():
                case ("open", Case() as one):
                    if this is not None:
                        this.close()
                    this = None
                    gc.collect()
                    this = Exchange(engine, one, rank, ranks, stand, timeout)
                    connection.send(this.a.descriptor())
                    this.a.connect(connection.recv())
                    connection.send(None)
                case ("stop",):
                    connection.send(None if this is None else [lost.rank for lost in this.a.lost])
                    return
                case asked:
                    assert this is not None
                    connection.send(_answer(this, *asked))


def _answer(this: Exchange, what: str, *arguments: int) -> object:
    match what, arguments:
        case "run", (seed,):
            return this.run(seed)
        case "capture", (seed,):
            return this.capture(seed)
        case "explain", ():
            return this.a.explain()
        case "orphan", (seed,):
            return orphan(this, seed)
    raise ValueError(f"{what} of {len(arguments)} is unknown")
