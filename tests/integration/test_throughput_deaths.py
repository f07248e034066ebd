"""High-throughput exchanges of processes of which one is killed while rows are on their way."""

from __future__ import annotations

import multiprocessing as mp
import shutil
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
#: Exchanges before anybody dies.
TURNS = 2


def work(rank: int, transport: str, kernels: Path | None, pipe: Connection) -> None:
    """Exchanges until one ends with an error, which is told."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine(name=f"rank-{rank}", transport=transport))
        stream = None if kernels is None else Stream(Host(kernels), 1)
        one = ThroughputAllToAll(
            engine, rank=rank, ranks=RANKS, ranks_per_node=PER_NODE, experts=EXPERTS, topk=TOPK,
            hidden=HIDDEN, max_tokens=TOKENS, parts=SOURCE, chunk=4, ring_chunks=2, timeout=20.0,
            workers=1, launcher=stream,
        )  # fmt: skip
        pipe.send(one.card())
        one.connect(pipe.recv())
        pipe.send(None)
        pipe.recv()
        turn = 0
        while True:
            x, idx, w = batch(turn * RANKS + rank, TOKENS - rank, EXPERTS, TOPK, HIDDEN)
            try:
                sums = layer(one, x, idx, w)
            except errors.PeerLost as error:
                said = str(error)
                break
            if turn < TURNS:
                want = hierarchical(
                    x, idx, w, local=EXPERTS // RANKS, per_node=PER_NODE, nodes=RANKS // PER_NODE
                )
                assert torch.equal(sums, want)
            turn += 1
            if turn == TURNS:
                pipe.send("under way")
        # Kernels end with the call that failed.
        if stream is not None:
            stream.finish(60.0)
        pipe.send((said, [lost.rank for lost in one.lost]))
        pipe.recv()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rs_4_a_rank_that_is_killed_is_named_by_all_and_their_kernels_end(
    transport: str, tmp_path: Path
) -> None:
    library = Host(tmp_path).built("moe/work.cu")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fabric_ray.moe"])
    pipes, processes = [], []
    try:
        for rank in range(RANKS):
            kernels = None
            if rank != 1:
                kernels = tmp_path / f"rank-{rank}"
                kernels.mkdir()
                shutil.copy(library, kernels)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(rank, transport, kernels, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)

        def hear(rank: int) -> object:
            assert pipes[rank].poll(120), f"rank {rank} says nothing"
            return pipes[rank].recv()

        cards = [hear(rank) for rank in range(RANKS)]
        for pipe in pipes:
            pipe.send(cards)
        for rank in range(RANKS):
            hear(rank)
        for pipe in pipes:
            pipe.send(None)
        for rank in range(RANKS):
            assert hear(rank) == "under way"
        processes[VICTIM].kill()
        for rank in range(RANKS):
            if rank != VICTIM:
                said, lost = hear(rank)
                assert f"rank {VICTIM} " in said
                assert lost == [VICTIM]
        for rank in range(RANKS):
            if rank != VICTIM:
                pipes[rank].send(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
