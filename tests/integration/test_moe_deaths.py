"""Ranks that die or stop at every step of an exchange: the others name them, and continue."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.kernels import channel, structs
from fabric_ray.moe import AllToAll
from tests.host_kernels import Host

EXPERTS, TOPK, HIDDEN, TOKENS = 12, 3, 64, 24
#: In place of a signal: the rank makes no more calls, while its engine runs.
STALL = 0
STEPS = ("before", "dispatched", "collected", "answered")


def batch(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rank 0 has nothing for the last experts: it waits for no answers of theirs."""
    g = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g).to(torch.bfloat16)
    idx = torch.rand(TOKENS, EXPERTS, generator=g)[:, : 9 if rank == 0 else EXPERTS].argsort(1)[
        :, :TOPK
    ]
    return x, idx, torch.rand(TOKENS, TOPK, generator=g)


def sums(rank: int, turn: int, ranks: int, left_out: tuple[int, ...]) -> torch.Tensor:
    """In one place: expert ``e`` answers ``e + 1`` times the token."""
    x, idx, w = batch(rank, turn)
    out = torch.zeros(TOKENS, HIDDEN)
    for k in range(TOPK):
        e = idx[:, k : k + 1]
        there = torch.ones_like(e, dtype=torch.bool)
        for gone in left_out:
            there &= e // (EXPERTS // ranks) != gone
        y = (x.float() * (e + 1)).to(torch.bfloat16).float()
        out += torch.where(there, w[:, k : k + 1] * y, 0.0)
    return out.to(torch.bfloat16)


def work(
    rank: int,
    ranks: int,
    transport: str,
    timeout: float,
    peer_timeout: float,
    end: tuple[int, str, int],
    kernels: Path | None,
    pipe: Connection,
) -> None:
    """Exchanges until told to stop; this rank ends itself by a signal at a step of one of them.

    Its part is done by the kernels of a folder, if one is given.
    """
    torch.set_num_threads(1)
    # The exchange gives up a stopped rank long before the engine does.
    engine = TransferEngine(name=f"rank-{rank}", transport=transport, peer_timeout=peer_timeout)
    a = AllToAll(
        engine,
        rank=rank,
        ranks=ranks,
        experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        private_rows=4,
        timeout=timeout,
        launcher=Host(kernels) if kernels else None,
    )
    pipe.send(a.descriptor())
    a.connect(pipe.recv())

    def step(turn: int, name: str) -> None:
        if end[:2] == (turn, name) and end[2] == STALL:
            pipe.recv()
        elif end[:2] == (turn, name):
            os.kill(os.getpid(), end[2])

    report: dict[str, Any] = {"left out": [], "wrong": 0}
    for turn in range(pipe.recv()):
        step(turn, "before")
        x, idx, w = batch(rank, turn)
        a.dispatch_send(x, idx)
        step(turn, "dispatched")
        got = a.dispatch_recv()
        y = torch.zeros(len(got.x), HIDDEN, dtype=torch.bfloat16)
        for local, expert in enumerate(a.local_experts):
            y[got.of(local)] = (got.x[got.of(local)].float() * (expert + 1)).to(torch.bfloat16)
        step(turn, "collected")
        a.combine_send(y)
        step(turn, "answered")
        out = a.combine_recv(w)
        report["wrong"] += not torch.equal(out, sums(rank, turn, ranks, a.left_out))
        report["left out"].append(a.left_out)
    report["lost"] = [(one.rank, one.stage, one.cause) for one in a.lost]
    pipe.send(report)
    pipe.recv()
    engine.close()


class Group:
    """Ranks as processes."""

    def __init__(
        self,
        ends: list[tuple[int, str, int]],
        *,
        transport: str,
        timeout: float,
        peer_timeout: float = 2.0,
        turns: int,
        kernels: Path | None = None,
    ) -> None:
        """With kernels, every other rank uses them."""
        # Torch is imported once, and each rank is a copy of a process without engines.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["fabric_ray.moe"])
        self.pipes, self.processes = [], []
        for rank, end in enumerate(ends):
            ours, theirs = context.Pipe()
            its = None if rank % 2 else kernels
            args = (rank, len(ends), transport, timeout, peer_timeout, end, its, theirs)
            process = context.Process(target=work, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        descriptors = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(descriptors)
        for pipe in self.pipes:
            pipe.send(turns)

    def report(self, rank: int) -> dict[str, Any]:
        assert self.pipes[rank].poll(120), f"rank {rank} says nothing"
        told: dict[str, Any] = self.pipes[rank].recv()
        return told

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("on_kernels", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rs_4_a_rank_killed_at_any_step_is_named_and_left_out(
    transport: str, on_kernels: bool, tmp_path: Path
) -> None:
    never = (-1, "", 0)
    deaths = [(2 + 2 * i, step, int(signal.SIGKILL)) for i, step in enumerate(STEPS)]
    kernels = tmp_path if on_kernels else None
    if on_kernels:
        for file in {**structs.ARGUMENTS, **channel.ARGUMENTS}:
            Host(tmp_path).built(file)
    group = Group(
        [never, never, *deaths], transport=transport, timeout=20.0, turns=12, kernels=kernels
    )
    try:
        for rank in (0, 1):
            told = group.report(rank)
            assert told["wrong"] == 0
            assert sorted(r for r, _, _ in told["lost"]) == [2, 3, 4, 5], told["lost"]
            # The first dies before its third turn: it has all answers of the second, while its
            # own may still wait in its memory. At the end all that it asks are left out.
            assert told["left out"][0] == ()
            asked = {2, 3, 4} if rank == 0 else {2, 3, 4, 5}
            assert set(told["left out"][-1]) == asked
    finally:
        group.close()


def test_mr_1_a_stopped_rank_is_left_out_and_writes_nothing_when_it_goes_on() -> None:
    never = (-1, "", 0)
    stop = (2, "dispatched", int(signal.SIGSTOP))
    group = Group([never, never, stop], transport="tcp", timeout=2.0, turns=8)
    try:
        for rank in (0, 1):
            told = group.report(rank)
            assert told["wrong"] == 0
            assert [r for r, _, _ in told["lost"]] == [2], told["lost"]
            assert told["left out"][-1] == (2,)
        os.kill(group.processes[2].pid, signal.SIGCONT)
        told = group.report(2)
        assert told["wrong"] == 0
        assert sorted(r for r, _, _ in told["lost"]) == [0, 1]
    finally:
        group.close()


@pytest.mark.parametrize(
    ("transport", "step", "how"),
    [
        ("shm", STEPS[1], STALL),
        ("tcp", STEPS[2], int(signal.SIGSTOP)),
        *(
            pytest.param(transport, step, how, marks=pytest.mark.long)
            for transport, step, how in [
                *(("shm", step, STALL) for step in STEPS if step != STEPS[1]),
                *(("tcp", step, STALL) for step in STEPS[1:3]),
                ("tcp", STEPS[1], int(signal.SIGSTOP)),
            ]
        ),
    ],
)
def test_rs_4_ranks_blocked_on_a_stalled_rank_are_not_given_up(
    transport: str, step: str, how: int
) -> None:
    """Rank 0 waits for ranks that wait for the last one, and wants nothing of that itself.

    One that is stopped lets go of memory when the engine gives it up, over tcp: over shm it
    never does.
    """
    never = (-1, "", 0)
    ends = [never, never, never, (1, step, how)]
    group = Group(ends, transport=transport, timeout=4.0, peer_timeout=5.0, turns=4)
    try:
        for rank in range(3):
            told = group.report(rank)
            assert told["wrong"] == 0
            assert [r for r, _, _ in told["lost"]] == [3], told["lost"]
    finally:
        group.close()
