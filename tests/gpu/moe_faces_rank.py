"""One rank's layers, gradients and familiar faces, in a process or a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll, cast, pplx
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from fabric_ray.moe.deepep import Buffer
from fabric_ray.moe.layer import ParallelExperts
from tests.moe_ranks import Expert, batch
from tests.stands import Stand

EXPERTS, TOPK, HIDDEN, M = 8, 2, 512, 32
TIMEOUT = 4.0


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


def layer(comm: PipeComm, engine: TransferEngine, stand: Stand) -> Tensor:
    """Of a batch, then captured and of another one."""

    def made(rank: int, ranks: int, experts: int) -> ParallelExperts:
        a = AllToAll(
            engine, rank=rank, ranks=ranks, experts=experts, topk=TOPK, hidden=HIDDEN,
            max_tokens=M, device=stand.device, launcher=stand.launcher, timeout=TIMEOUT,
        )  # fmt: skip
        return ParallelExperts(a, Expert, max_tokens=M)

    def given(seed: int, experts: int = EXPERTS) -> list[Tensor]:
        return [t.to(stand.device) for t in batch(seed, M, experts, TOPK, HIDDEN)]

    # A rank alone loads the kernels: one that is loaded while another waits would wait for it.
    alone = made(0, 1, EXPERTS // comm.size())
    alone(*given(0, EXPERTS // comm.size()))
    alone.exchange.check()
    alone.exchange.close()
    one = made(comm.rank(), comm.size(), EXPERTS)
    one.exchange.connect(comm.all_gather(one.exchange.descriptor()))
    comm.all_gather(b"")
    here = given(comm.rank())
    first = one(*here).clone()
    one.exchange.check()
    comm.all_gather(b"")
    kept: list[Tensor] = []
    replay = stand.capture(lambda: kept.append(one(*here)))
    comm.all_gather(b"")
    for old, new in zip(here, given(10 + comm.rank()), strict=True):
        old.copy_(new)
    replay()
    one.exchange.check()
    found = torch.stack([first, kept[0]]).cpu()
    comm.all_gather(b"")
    return found


def gradients(comm: Any, engine: TransferEngine, stand: Stand) -> list[Tensor | None]:
    a = Differentiable(
        engine, rank=comm.rank(), ranks=comm.size(), experts=EXPERTS, topk=TOPK, hidden=64,
        max_tokens=M, dtype=torch.float32, device=stand.device, launcher=stand.launcher,
        timeout=TIMEOUT,
    )  # fmt: skip
    a.connect(comm.all_gather(a.descriptor()))
    comm.all_gather(b"")
    there = (t.to(stand.device) for t in batch(comm.rank(), M, EXPERTS, TOPK, 64, torch.float32))
    x, idx, w = there
    x.requires_grad_()
    w.requires_grad_()
    # Loads what runs between the calls, backwards too.
    rows = torch.zeros(M, 64, device=stand.device, requires_grad=True)
    (rows * (idx[:, :1] + 2)).sum().backward()
    stand.finish()
    comm.all_gather(b"")
    got = dispatch(a, x, idx)
    combine(a, got.x * (got.experts()[:, None] + 2), w).sum().backward()
    a.check()
    comm.all_gather(b"")
    return [None if t is None else t.cpu() for t in (x.grad, w.grad)]


def deepep(comm: PipeComm, engine: TransferEngine, stand: Stand, how: str) -> list[Tensor]:
    """The sums of a batch, and those of two more if calls are ``captured`` and replayed."""
    buffer = Buffer(
        low_latency_mode=True, comm=comm, engine=engine, timeout=TIMEOUT, launcher=stand.launcher
    )
    given = [t.to(stand.device) for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)]
    x, idx, w = given
    options = {"async_finish": how == "async", "return_recv_hook": how in ("hook", "captured")}
    # Loads what runs between the calls.
    answers(cast.to_fp8(x.expand(EXPERTS // comm.size(), M, HIDDEN).reshape(-1, HIDDEN)), 0)
    out: list[Tensor] = []

    def step() -> None:
        recv, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, M, EXPERTS, **options
        )
        if hook is not None:
            hook()
        event.current_stream_wait()
        assert counts.device.type == stand.device.type
        y = answers(recv, comm.rank())
        sums, event, hook = buffer.low_latency_combine(y, idx, w, handle, **options)
        if hook is not None:
            hook()
        event.current_stream_wait()
        out[:] = [sums]

    stand.finish()
    comm.all_gather(b"")
    for _ in range(3):
        step()
    buffer.check()
    found = [out[0].cpu().clone()]
    if how == "captured":
        comm.all_gather(b"")
        replay = stand.capture(step)
        comm.all_gather(b"")
        for seed in (10, 20):
            fresh = batch(seed + comm.rank(), M, EXPERTS, TOPK, HIDDEN)
            for here, new in zip(given, fresh, strict=True):
                here.copy_(new)
            replay()
            buffer.check()
            found.append(out[0].cpu().clone())
    buffer.destroy()
    return found


def masks(comm: PipeComm, engine: TransferEngine, stand: Stand) -> list[int]:
    """What rank 0's masks say right behind calls in which the last rank took no part."""
    buffer = Buffer(
        low_latency_mode=True, comm=comm, engine=engine, timeout=1.0, launcher=stand.launcher,
        enable_shrink=True,
    )  # fmt: skip
    x, idx, w = (t.to(stand.device) for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN))
    status = torch.zeros(comm.size(), dtype=torch.int32, device=stand.device)

    def step() -> None:
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS)
        buffer.low_latency_combine(answers(recv, comm.rank()), idx, w, handle)

    step()
    stand.finish()
    comm.all_gather(b"")
    if not comm.rank():
        step()
        buffer.low_latency_query_mask_buffer(status)
    comm.all_gather(b"")
    found: list[int] = status.tolist()
    buffer.destroy()
    return found


def normal_calls(
    comm: Any, engine: TransferEngine, stand: Stand, per_node: int
) -> list[Tensor | None]:
    """What comes and what comes back of a layer, forward and backward."""
    buffer = Buffer(
        comm=comm, engine=engine, ranks_per_node=per_node, timeout=TIMEOUT, launcher=stand.launcher
    )
    x, idx, w = (t.to(stand.device) for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN))
    per_rank, per_node_, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
    recv, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
        x, None, per_rank, per_node_, in_rank, per_expert, idx, w, 8, previous_event=event
    )
    event.current_stream_wait()
    y = (recv.float() * (recv_w.sum(1, keepdim=True) + comm.rank())).to(torch.bfloat16)
    out, _, event = buffer.combine(y, handle, previous_event=buffer.capture(), bias=x)
    back, *_, event = buffer.dispatch(out, handle=handle, previous_event=event)
    grads, weights, event = buffer.combine(back, handle, recv_w, previous_event=event)
    event.current_stream_wait()
    buffer.check()
    assert recv.device == grads.device == x.device
    found = [recv, recv_idx, recv_w, torch.tensor(counts), out, back, grads, weights]
    found = [None if t is None else t.cpu() for t in found]
    buffer.destroy()
    return found


def pplx_calls(comm: PipeComm, engine: TransferEngine, stand: Stand, tokens: int) -> list[Tensor]:
    """The sums of a batch, then of a replay with another batch and one token less, if any."""
    ranks, local = comm.size(), EXPERTS // comm.size()
    a = pplx.AllToAll.internode(
        M, EXPERTS, TOPK, comm.rank(), ranks, 1, HIDDEN, 2 * HIDDEN, 0, comm=comm, engine=engine,
        device=stand.device, launcher=stand.launcher, timeout=TIMEOUT,
    )  # fmt: skip
    given = [t.to(stand.device) for t in batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)]
    x, idx, w = given
    counts = torch.empty(local, dtype=torch.int32, device=stand.device)
    room = torch.zeros(local, M * ranks, HIDDEN, dtype=torch.bfloat16, device=stand.device)
    out = torch.zeros(M, HIDDEN, dtype=torch.bfloat16, device=stand.device)
    bound = torch.tensor([tokens], dtype=torch.uint32, device=stand.device)
    # Loads what runs between the calls.
    answers(room, comm.rank())
    stand.finish()
    comm.all_gather(b"")

    def step() -> None:
        a.dispatch(counts, room, None, x, None, idx, bound)
        a.combine(out, idx, w, answers(room, comm.rank()), bound)

    step()
    a.check()
    found = [out.cpu().clone()]
    comm.all_gather(b"")
    replay = stand.capture(step)
    comm.all_gather(b"")
    for here, new in zip(given, batch(10 + comm.rank(), M, EXPERTS, TOPK, HIDDEN), strict=True):
        here.copy_(new)
    bound.copy_(torch.tensor([max(0, tokens - 1)], dtype=torch.uint32))
    out.zero_()
    replay()
    a.check()
    found.append(out.cpu().clone())
    a.destroy()
    return found


def serve(
    connection: Connection,
    rank: int,
    ranks: int,
    transport: str,
    make_stand: Callable[[], Stand],
) -> None:
    """Does one thing after the other until it is told to stop."""
    comm = PipeComm(connection, rank, ranks)
    stand = make_stand()
    with TransferEngine(name=f"rank-{rank}", transport=transport, token=b"gpu") as engine:
        while True:
            match connection.recv():
                case ("layer",):
                    done: Any = layer(comm, engine, stand)
                case ("gradients",):
                    done = gradients(comm, engine, stand)
                case ("deepep", how):
                    done = deepep(comm, engine, stand, how)
                case ("masks",):
                    done = masks(comm, engine, stand)
                case ("normal", per_node):
                    done = normal_calls(comm, engine, stand, per_node)
                case ("pplx", tokens):
                    done = pplx_calls(comm, engine, stand, tokens)
                case ("stop",):
                    connection.send(("done", None))
                    return
            connection.send(("done", done))
