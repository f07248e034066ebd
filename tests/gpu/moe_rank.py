"""One rank of an exchange on a GPU, in a process of its own."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll
from tests.moe_ranks import batch

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 512, 64
TIMEOUT = 20.0
Options = dict[str, Any]


def experts(a: AllToAll, rows: torch.Tensor, each: int) -> torch.Tensor:
    """``tests.moe_ranks.expert`` of all local experts, whose rows are ``each`` apart."""
    number = torch.tensor(list(a.local_experts), device=rows.device).view(-1, 1, 1).float()
    x = rows.view(len(a.local_experts), each, -1).float()
    return (x * (number + 1) + number).to(torch.bfloat16).view(rows.shape)


class Rank:
    """Its exchange, and tensors at fixed addresses for a graph."""

    def __init__(self, engine: TransferEngine, rank: int, ranks: int, **options: Any) -> None:
        self.a = AllToAll(
            engine, rank=rank, ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
            max_tokens=TOKENS, timeout=TIMEOUT, **options,
        )  # fmt: skip
        self.each = ranks * TOKENS
        self.device = torch.device(options.get("device") or "cpu")
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=self.device)
        self.idx = torch.full((TOKENS, TOPK), -1, device=self.device)
        self.w = torch.zeros(TOKENS, TOPK, device=self.device)
        self.sums = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def give(self, seed: int) -> None:
        x, idx, w = batch(seed, TOKENS, EXPERTS, TOPK, HIDDEN)
        self.x.copy_(x)
        self.idx.copy_(idx)
        self.w.copy_(w)

    def exchange(self) -> None:
        a = self.a
        a.dispatch_send(self.x, self.idx)
        got = a.dispatch_recv(stride=self.each)
        y = torch.zeros_like(got.x)
        if self.device.type == "cuda":
            y = experts(a, got.x, self.each)
        else:
            for local in range(len(a.local_experts)):
                of = got.of(local)
                y[of] = experts(a, got.x, self.each)[of]
        a.combine_send(y)
        a.combine_recv(self.w, out=self.sums)

    def capture(self) -> None:
        """The ranks capture one after another; none of them waits for anybody meanwhile."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.exchange()

    def orphan(self, seed: int) -> torch.Tensor:
        """The sums after a replay of the graph, when its exchange is gone."""
        assert self.graph is not None
        self.a.close()
        del self.a
        gc.collect()
        self.give(seed)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.sums.cpu()

    def run(self, seed: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        self.give(seed)
        if self.graph is None:
            self.exchange()
        else:
            self.graph.replay()
        self.a.check()
        return self.sums.cpu(), self.a.left_out


def serve(
    connection: Connection, rank: int, ranks: int, transport: str, on_gpu: bool, options: Options
) -> None:
    """Answers until it is told to stop, or killed."""
    if on_gpu:
        options = {**options, "device": "cuda"}
    with TransferEngine(name=f"rank-{rank}", transport=transport, token=b"gpu") as engine:
        this = Rank(engine, rank, ranks, **options)
        connection.send(this.a.card())
        this.a.connect(connection.recv())
        connection.send(None)
        while True:
            match connection.recv():
                case ("run", seed):
                    connection.send(this.run(seed))
                case ("capture",):
                    this.capture()
                    connection.send(None)
                case ("explain",):
                    connection.send(this.a.explain())
                case ("orphan", seed):
                    connection.send(this.orphan(seed))
                case ("stop",):
                    connection.send([lost.rank for lost in this.a.lost])
                    return
