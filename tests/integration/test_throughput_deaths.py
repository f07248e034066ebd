"""High-throughput exchanges of processes. One is killed while rows are in flight, and restarts."""

from __future__ import annotations

import multiprocessing as mp
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import ThroughputAllToAll
from tests.host_kernels import Host, Stream
from tests.moe_ranks import batch
from tests.throughput_ranks import HIDDEN, SOURCE, hierarchical, layer

RANKS, PER_NODE, EXPERTS, TOPK, TOKENS = 4, 2, 8, 3, 40
VICTIM = 2
#: Exchanges before a rank dies.
TURNS = 2


def work(
    rank: int, incarnation: int, transport: str, kernels: Path | None, pipe: Connection
) -> None:
    """Exchanges until a peer is lost and sends the error; goes on without that rank, then with its
    successor."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine(name=f"rank-{rank}", transport=transport))
        stream = None if kernels is None else Stream(Host(kernels), 1)
        one = ThroughputAllToAll(
            engine, rank=rank, ranks=RANKS, ranks_per_node=PER_NODE, experts=EXPERTS, topk=TOPK,
            hidden=HIDDEN, max_tokens=TOKENS, parts=SOURCE, chunk=4, ring_chunks=2, timeout=20.0,
            workers=1, launcher=stream, incarnation=incarnation,
        )  # fmt: skip

        def exchange(turn: int, here: Sequence[bool] = (True,) * RANKS, *, checked: bool) -> None:
            x, idx, w = batch(turn * RANKS + rank, TOKENS - rank, EXPERTS, TOPK, HIDDEN)
            sums = layer(one, x, idx, w)
            if not checked:
                return
            local, per_node = EXPERTS // RANKS, PER_NODE if all(here) else 1
            gone = ~torch.tensor(here)[idx.clamp(min=0) // local]
            idx = idx.masked_fill(gone, -1)
            nodes = RANKS // per_node
            want = hierarchical(x, idx, w, local=local, per_node=per_node, nodes=nodes)
            assert torch.equal(sums, want)

        pipe.send(one.descriptor())
        one.connect(pipe.recv())
        pipe.send(None)
        pipe.recv()
        if incarnation == 0:
            pipe.send(until_a_rank_dies(exchange, pipe))
            for turn in range(10, 12):
                exchange(turn, one.present, checked=True)
            pipe.send([lost.rank for lost in one.lost])
            pipe.recv()
            pipe.send(one.descriptor())
            one.admit(pipe.recv())
            pipe.send(None)
            pipe.recv()
        for turn in range(20, 22):
            exchange(turn, checked=True)
        pipe.send(one.present)
        pipe.recv()
        # Kernels end with the calls.
        if stream is not None:
            stream.finish(60.0)


def until_a_rank_dies(exchange: Callable[..., None], pipe: Connection) -> str:
    turn = 0
    while True:
        try:
            exchange(turn, checked=turn < TURNS)
        except errors.PeerLost as error:
            return str(error)
        turn += 1
        if turn == TURNS:
            pipe.send("under way")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rs_4_a_rank_that_is_killed_is_named_by_all_left_out_and_comes_again(
    transport: str, tmp_path: Path
) -> None:
    library = Host(tmp_path).built("moe/work.cu")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fabric_ray.moe"])
    pipes, processes = [], []
    try:

        def start(rank: int, incarnation: int) -> None:
            kernels = None
            if rank != 1:
                kernels = tmp_path / f"rank-{rank}-{incarnation}"
                kernels.mkdir()
                shutil.copy(library, kernels)
            ours, theirs = context.Pipe()
            given = (rank, incarnation, transport, kernels, theirs)
            process = context.Process(target=work, args=given, daemon=True)
            process.start()
            theirs.close()
            pipes.insert(rank, ours)
            processes.insert(rank, process)

        for rank in range(RANKS):
            start(rank, 0)

        def hear(rank: int) -> object:
            assert pipes[rank].poll(120), f"rank {rank} says nothing"
            return pipes[rank].recv()

        descriptors = [hear(rank) for rank in range(RANKS)]
        for pipe in pipes:
            pipe.send(descriptors)
        for rank in range(RANKS):
            hear(rank)
        for pipe in pipes:
            pipe.send(None)
        for rank in range(RANKS):
            assert hear(rank) == "under way"
        processes[VICTIM].kill()
        processes.pop(VICTIM).join()
        others = [rank for rank in range(RANKS) if rank != VICTIM]
        for rank in others:
            said = hear(rank)
            assert isinstance(said, str)
            assert f"rank {VICTIM} " in said
        for rank in others:
            assert hear(rank) == [VICTIM]
        pipes.pop(VICTIM)
        start(VICTIM, 1)
        for rank in others:
            pipes[rank].send(None)
        descriptors = [hear(rank) for rank in range(RANKS)]
        for rank in range(RANKS):
            pipes[rank].send(descriptors if rank == VICTIM else descriptors[VICTIM])
        for rank in range(RANKS):
            hear(rank)
        for pipe in pipes:
            pipe.send(None)
        for rank in range(RANKS):
            assert hear(rank) == (True,) * RANKS
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
