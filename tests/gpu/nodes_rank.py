"""One rank of a high-throughput exchange on a GPU, in a process of its own."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import ThroughputAllToAll
from tests.moe_ranks import batch, expert

PER_NODE, TOPK, HIDDEN, TOKENS, LOCAL = 2, 3, 512, 200, 2
TIMEOUT = 4.0


def exchange(one: ThroughputAllToAll, seed: int, device: str) -> torch.Tensor:
    x, idx, w = batch(seed, TOKENS, one.ranks * LOCAL, TOPK, HIDDEN)
    one.dispatch_send(x.to(device), idx.to(device), weights=w.to(device))
    got = one.dispatch_recv(multiple=8)
    y = torch.zeros_like(got.x)
    for local, number in enumerate(one.local_experts):
        y[got.of(local)] = expert(number, got.x[got.of(local)])
    one.combine_send(y)
    return one.combine_recv(dtype=torch.float32).cpu()


def serve(connection: Connection, rank: int, ranks: int, transport: str, on_gpu: bool) -> None:
    """Answers until it is told to stop, or killed."""
    device = "cuda" if on_gpu else "cpu"
    # An engine that is opened later finds CUDA in use.
    torch.zeros(1, device=device)
    with TransferEngine(name=f"rank-{rank}", transport=transport, token=b"gpu") as engine:
        one = ThroughputAllToAll(
            engine,
            rank=rank,
            ranks=ranks,
            ranks_per_node=PER_NODE,
            experts=ranks * LOCAL,
            topk=TOPK,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            timeout=TIMEOUT,
            device=device,
        )
        connection.send(one.descriptor())
        one.connect(connection.recv())
        connection.send(None)
        while True:
            match connection.recv():
                case ("run", seed):
                    try:
                        connection.send(exchange(one, seed, device))
                    except errors.PeerLost as error:
                        # The context stays usable.
                        assert float(torch.ones(8, device=device).sum()) == 8
                        connection.send(str(error))
                case ("stop",):
                    connection.send([lost.rank for lost in one.lost])
                    return
