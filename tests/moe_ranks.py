"""Ranks of an exchange as threads of a test."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll

WAIT = 60.0


class ThreadComm:
    """``rank()``, ``size()`` and ``all_gather`` for threads that share ``board``. What is on
    ``stack`` ends once all of them have ended."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self._board = rank, board
        self.stack = ExitStack()
        self.joined: list[Any] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._board.values)

    def all_gather(self, value: bytes) -> list[bytes]:
        assert isinstance(value, bytes)
        self._board.values[self._rank] = value
        self._board.barrier.wait(WAIT)
        values = list(self._board.values)
        self._board.barrier.wait(WAIT)
        self._board.gathers[self._rank] += 1
        return values


class Board:
    def __init__(self, ranks: int) -> None:
        self.values = [b""] * ranks
        self.gathers = [0] * ranks
        self.barrier = threading.Barrier(ranks)


def on_ranks(ranks: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """What ``work`` returns on each rank, each in a thread; the first error is raised."""
    board = Board(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm = ThreadComm(rank, board)
        try:
            with comm.stack:
                try:
                    results[rank] = work(comm)
                    if comm.joined:
                        comm.all_gather(b"")
                except BaseException as error:
                    errors.append(error)
                    board.barrier.abort()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def on_all_ranks(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on each of so many ranks, in a thread. Its first argument is the rank's ``comm``,
    and the others are pytest's."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **options: Any) -> None:
            on_ranks(ranks, lambda comm: test(comm, *args, **options))

        signature = inspect.signature(test)
        parameters = list(signature.parameters.values())[1:]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorated


def rank_of(
    kind: Callable[..., Any], comm: ThreadComm, transport: str = "shm", **options: Any
) -> Any:
    """This rank of an exchange that all ranks have joined; open until all ranks have ended."""
    engine = TransferEngine(name=f"rank-{comm.rank()}", transport=transport)
    comm.stack.enter_context(engine)
    rank = kind(engine, rank=comm.rank(), ranks=comm.size(), **options)
    rank.connect(comm.all_gather(rank.descriptor()))
    comm.all_gather(b"")
    comm.joined.append(rank)
    return rank


def batch(
    seed: int,
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts (some -1) and weights; the same for the same seed, wherever."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    idx = torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk].contiguous()
    idx[torch.rand(idx.shape, generator=g) < 0.15] = -1
    return x, idx, torch.rand(tokens, topk, generator=g)


def expert(number: int, x: torch.Tensor) -> torch.Tensor:
    return (x.float() * (number + 1) + number).to(torch.bfloat16)


class Expert(torch.nn.Module):
    """The same as a module: of elements by themselves, so that a GPU computes the host's bits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return expert(self._number, x)


def layer(
    a: AllToAll, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, multiple: int = 1
) -> torch.Tensor:
    """One exchange, with the experts above behind it."""
    a.dispatch_send(x, idx)
    got = a.dispatch_recv(multiple=multiple)
    y = torch.zeros(len(got.x), got.x.shape[1], dtype=torch.bfloat16)
    for local, number in enumerate(a.local_experts):
        y[got.of(local)] = expert(number, got.x[got.of(local)])
    a.combine_send(y)
    return a.combine_recv(w)


def unsharded(
    x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, gone: range = range(0), first: int = 0
) -> torch.Tensor:
    """The same in one place, without the experts that are gone; ``idx`` counts from ``first``."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t, k in (idx >= 0).nonzero().tolist():
        if (number := first + int(idx[t, k])) not in gone:
            out[t] += w[t, k] * expert(number, x[t]).float()
    return out.to(torch.bfloat16)
