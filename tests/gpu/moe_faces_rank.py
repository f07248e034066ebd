"""One rank's layers, gradients and familiar faces on a GPU, in a process of its own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll, cast, pplx
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from fabric_ray.moe.deepep import Buffer
from fabric_ray.moe.layer import MoeConfig, MoeWeights, ParallelMoeLayer
from tests.moe_ranks import batch

EXPERTS, TOPK, HIDDEN, M = 8, 2, 512, 32
CONFIG = MoeConfig(
    hidden=128, experts=EXPERTS, topk=TOPK, intermediate=64, shared_intermediate=64,
    score="sigmoid", groups=4, kept_groups=2, bias=True,
)  # fmt: skip


class PipeComm:
    """``rank()``, ``size()`` and ``all_gather`` through the test."""

    def __init__(self, connection: Connection, rank: int, ranks: int) -> None:
        self._connection, self._rank, self._ranks = connection, rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def all_gather(self, value: bytes) -> list[bytes]:
        self._connection.send(("gather", value))
        found: list[bytes] = self._connection.recv()
        return found


def answers(recv: Any, rank: int) -> Tensor:
    """``tests.moe_ranks.expert`` of all local experts."""
    x = cast.back(*recv) if isinstance(recv, tuple) else recv
    number = rank * len(x) + torch.arange(len(x), device=x.device).view(-1, 1, 1).float()
    return (x.float() * (number + 1) + number).to(torch.bfloat16)


def layer(comm: PipeComm, engine: TransferEngine) -> Tensor:
    """Of a batch, then captured and of another one."""
    a = AllToAll(
        engine, rank=comm.rank(), ranks=comm.size(), experts=EXPERTS, topk=TOPK,
        hidden=CONFIG.hidden, max_tokens=M, dtype=torch.float32, answer_dtype=torch.float32,
        device="cuda", timeout=20.0,
    )  # fmt: skip
    a.connect(comm.all_gather(a.card()))
    comm.all_gather(b"")
    weights = MoeWeights.random(CONFIG, seed=0, experts=a.local_experts).to("cuda")
    one = ParallelMoeLayer(CONFIG, weights, a, max_tokens=M)
    x = batch(comm.rank(), M, EXPERTS, TOPK, CONFIG.hidden, torch.float32)[0].cuda()
    first = one.forward(x)
    a.check()
    comm.all_gather(b"")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one.forward(x)
    comm.all_gather(b"")
    x.copy_(batch(10 + comm.rank(), M, EXPERTS, TOPK, CONFIG.hidden, torch.float32)[0])
    graph.replay()
    a.check()
    found = torch.stack([first, out]).cpu()
    del graph
    comm.all_gather(b"")
    return found


def gradients(comm: Any, engine: TransferEngine, device: str) -> list[Tensor | None]:
    a = Differentiable(
        engine, rank=comm.rank(), ranks=comm.size(), experts=EXPERTS, topk=TOPK, hidden=64,
        max_tokens=M, dtype=torch.float32, device=device, timeout=20.0,
    )  # fmt: skip
    a.connect(comm.all_gather(a.card()))
    comm.all_gather(b"")
    x, idx, w = (t.to(device) for t in batch(comm.rank(), M, EXPERTS, TOPK, 64, torch.float32))
    x.requires_grad_()
    w.requires_grad_()
    got = dispatch(a, x, idx)
    combine(a, got.x * (got.experts()[:, None] + 2), w).sum().backward()
    a.check()
    comm.all_gather(b"")
    return [None if t is None else t.cpu() for t in (x.grad, w.grad)]


def deepep(comm: PipeComm, engine: TransferEngine, how: str) -> Tensor:
    buffer = Buffer(low_latency_mode=True, comm=comm, engine=engine, timeout=20.0)
    x, idx, w = (t.cuda() for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN))
    options = {"async_finish": how == "async", "return_recv_hook": how == "hook"}
    for _ in range(3):
        recv, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, M, EXPERTS, **options
        )
        if hook is not None:
            hook()
        event.current_stream_wait()
        assert counts.device.type == "cuda"
        y = answers(recv, comm.rank())
        out, event, hook = buffer.low_latency_combine(y, idx, w, handle, **options)
        if hook is not None:
            hook()
        event.current_stream_wait()
    found = out.cpu()
    buffer.check()
    buffer.destroy()
    return found


def pplx_calls(comm: PipeComm, engine: TransferEngine, tokens: int) -> Tensor:
    ranks, local = comm.size(), EXPERTS // comm.size()
    a = pplx.AllToAll.internode(
        M, EXPERTS, TOPK, comm.rank(), ranks, 1, HIDDEN, 2 * HIDDEN, 0, comm=comm, engine=engine,
        device="cuda", timeout=20.0,
    )  # fmt: skip
    x, idx, w = (t.cuda() for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN))
    counts = torch.empty(local, dtype=torch.int32, device="cuda")
    room = torch.empty(local, M * ranks, HIDDEN, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(M, HIDDEN, dtype=torch.bfloat16, device="cuda")
    bound = torch.tensor([tokens], dtype=torch.uint32, device="cuda")
    a.dispatch(counts, room, None, x, None, idx, bound)
    a.combine(out, idx, w, answers(room, comm.rank()), bound)
    a.check()
    found = out.cpu()
    a.destroy()
    return found


def serve(connection: Connection, rank: int, ranks: int) -> None:
    """Does one thing after the other until it is told to stop."""
    comm = PipeComm(connection, rank, ranks)
    torch.zeros(1, device="cuda")
    with TransferEngine(name=f"rank-{rank}", transport="cuda_ipc", token=b"gpu") as engine:
        while True:
            match connection.recv():
                case ("layer",):
                    done: Any = layer(comm, engine)
                case ("gradients",):
                    done = gradients(comm, engine, "cuda")
                case ("deepep", how):
                    done = deepep(comm, engine, how)
                case ("pplx", tokens):
                    done = pplx_calls(comm, engine, tokens)
                case ("stop",):
                    connection.send(("done", None))
                    return
            connection.send(("done", done))
