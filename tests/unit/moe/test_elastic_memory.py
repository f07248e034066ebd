"""DeepEP's Engram, pipeline calls and all-gather sessions, as its own tests make these calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe import cast
from fabric_ray.moe.deepep import ElasticBuffer
from tests.moe_ranks import ThreadComm, on_all_ranks, on_ranks

invalid = errors.InvalidArgument


def seeded(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(s * 1009**i for i, s in enumerate(seed)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_entries_of_any_rank_are_fetched(ranks: int, fp8: bool) -> None:
    entries, hidden, tokens, each = 50, 256, 12, 5

    def work(comm: ThreadComm) -> None:
        gpu, cpu = ElasticBuffer.get_engram_storage_size_hint(entries, hidden, tokens * each)
        buffer = ElasticBuffer(
            comm=comm, num_bytes=gpu + cpu, num_cpu_bytes=cpu, explicitly_destroy=True
        )
        for turn in range(2):
            whole = torch.cat(
                [torch.randn(entries, hidden, generator=seeded(turn, r)) for r in range(ranks)]
            ).to(torch.bfloat16)
            sf = None
            if fp8:
                whole, sf = cast.to_fp8(whole)
            mine = slice(comm.rank() * entries, (comm.rank() + 1) * entries)
            buffer.engram_write(whole[mine].contiguous(), sf=sf)
            fetched = []
            for batch in range(3):
                g = seeded(turn, batch, comm.rank())
                indices = torch.randint(0, ranks * entries, (tokens, each), generator=g).int()
                fetched.append((indices, buffer.engram_fetch(indices)))
            for indices, wait in fetched:
                data, scales = wait()
                flat = indices.flatten().long()
                assert data.dtype == whole.dtype
                wanted = whole.view(torch.uint8)[flat].view(tokens, -1)
                assert torch.equal(data.view(torch.uint8), wanted)
                if sf is None:
                    assert scales is None
                    continue
                wanted = sf[flat].view(tokens, -1)
                assert torch.equal(scales, wanted)
                by_column = buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=True)()[1]
                assert by_column is not None
                assert by_column.stride() == (1, tokens)
                assert torch.equal(by_column, wanted)
        buffer.destroy()

    on_ranks(ranks, work)


def operations(rank: int, ranks: int, sends: int, seed: int) -> list[tuple[str, int, torch.Tensor]]:
    """What a rank does of random sends between neighbours, each received some time later."""
    draw = random.Random(seed)
    times: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for _ in range(sends):
        source = draw.randrange(ranks)
        target = (source + draw.choice([1, -1])) % ranks
        at = draw.randrange(10**8)
        times.setdefault((source, target), []).append((at, at + draw.randrange(1, 3 * 10**6)))
    found = []
    for (source, target), both in times.items():
        sent, received = (sorted(each) for each in zip(*both, strict=True))
        for number, (begin, end) in enumerate(zip(sent, received, strict=True)):
            size = 1 + (number * 7 + source) % 40
            tensor = torch.randn(size, 16, generator=seeded(seed, source, target, number))
            if source == rank:
                found.append((begin, number, "send", target, tensor))
            if target == rank:
                found.append((end, number, "receive", source, tensor))
    found.sort(key=lambda one: one[:2])
    return [one[2:] for one in found]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tensors_go_to_neighbours_in_order(ranks: int) -> None:
    nbytes, inflight = 40 * 16 * 4, 4

    def work(comm: ThreadComm) -> None:
        buffer = ElasticBuffer(
            comm=comm, num_bytes=ElasticBuffer.get_pp_buffer_size_hint(nbytes, inflight)
        )
        for seed in range(3):
            buffer.pp_set_config(nbytes, inflight)
            for what, peer, tensor in operations(comm.rank(), ranks, 60, seed):
                if what == "send":
                    sent = tensor.clone()
                    buffer.pp_send(sent, peer)
                    sent.fill_(float("nan"))
                else:
                    got = torch.empty_like(tensor)
                    buffer.pp_recv(got, peer)
                    assert torch.equal(got, tensor)
        buffer.destroy()

    on_ranks(ranks, work)


def session_operations(gathers: int, most: int, draw: random.Random) -> list[tuple[str, Any]]:
    """Gathers, some at a time, waits for them in any order, and sessions around them."""
    left, inflight, room = draw.sample(range(gathers), gathers), [], most
    found: list[tuple[str, Any]] = [("create", None)]
    while left or inflight:
        choices = ["gather"] * bool(min(len(left), room)) + (["wait"] if inflight else ["end"])
        choice = draw.choice(choices)
        if choice == "gather":
            some = tuple(left[-draw.randint(1, min(len(left), room)) :])
            del left[-len(some) :]
            room -= len(some)
            inflight.append(some)
            found.append(("gather", some))
        elif choice == "wait":
            found.append(("wait", inflight.pop(draw.randrange(len(inflight)))))
        else:
            found += [("destroy", None), ("create", None)]
            room = most
    return [*found, ("destroy", None)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sessions_gather_from_all_ranks(ranks: int) -> None:
    shape, most, gathers = (3, 8, 5), 4, 40
    whole = [
        torch.stack([torch.randn(shape, generator=seeded(i, r)) for r in range(ranks)])
        for i in range(gathers)
    ]

    def gather(buffer: ElasticBuffer, tensors: list[torch.Tensor], draw: random.Random) -> Any:
        given = tuple(tensors)
        if draw.random() < 0.5:
            given = buffer.agrs_get_inplace_tensor([t.shape for t in tensors], torch.float32)
            for into, tensor in zip(given, tensors, strict=True):
                into.copy_(tensor)
        if draw.random() < 0.8:
            *out, wait = buffer.all_gather(given)
            return out, [wait]
        return [list(each) for each in zip(*map(buffer.all_gather, given), strict=True)]

    def work(comm: ThreadComm) -> None:
        comm.group = comm
        nbytes = ElasticBuffer.get_agrs_num_max_session_bytes(comm, [shape] * most, torch.float32)
        assert nbytes == most * (-(-ranks * 3 * 8 * 5 * 4 // 32) * 32)
        buffer = ElasticBuffer(
            comm=comm, num_bytes=ElasticBuffer.get_agrs_buffer_size_hint(comm, nbytes)
        )
        buffer.agrs_set_config(nbytes, most)
        for seed in range(3):
            draw = random.Random(seed)
            results: dict[int, torch.Tensor] = {}
            handles: dict[tuple[int, ...], Any] = {}
            for what, some in session_operations(gathers, most, draw):
                if what == "create":
                    buffer.create_agrs_session()
                elif what == "destroy":
                    buffer.destroy_agrs_session()
                elif what == "gather":
                    handles[some] = gather(buffer, [whole[i][comm.rank()] for i in some], draw)
                else:
                    out, waits = handles[some]
                    for wait in waits:
                        wait()
                    results |= {i: t.clone() for i, t in zip(some, out, strict=True)}
            assert all(torch.equal(results[i], whole[i]) for i in range(gathers))
        with buffer.agrs_new_session(enabled=False), buffer.agrs_new_session():
            out, wait = buffer.all_gather(torch.full((2,), float(comm.rank())))
            wait()
            wait()
            assert torch.equal(out[:, 1], torch.arange(ranks).float())
        buffer.destroy()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_what_does_not_fit_is_said_before_anything_is_sent(comm: ThreadComm) -> None:
    buffer = ElasticBuffer(comm=comm, num_gpu_timeout_secs=2)
    storage = torch.zeros(4, 32, dtype=torch.bfloat16)
    indices = torch.zeros(1, 2, dtype=torch.int32)
    tensor = torch.zeros(8)
    for words, call in [
        ("engram_write first", lambda: buffer.engram_fetch(indices)),
        ("pp_set_config first", lambda: buffer.pp_send(tensor, 1)),
        ("agrs_set_config first", buffer.create_agrs_session),
        (r"\[entries, hidden\]", lambda: buffer.engram_write(storage.float())),
        ("not contiguous", lambda: buffer.engram_write(storage.T)),
        ("both or none", lambda: buffer.engram_write(storage, tensor)),
        (
            r"4 bytes \[8, packs\]",
            lambda: buffer.engram_write(storage.to(torch.float8_e4m3fn), tensor),
        ),
        ("at least 1", lambda: buffer.pp_set_config(0, 1)),
        ("at least 1", lambda: buffer.agrs_set_config(1, 0)),
    ]:
        with pytest.raises(invalid, match=words):
            call()
    with pytest.raises(errors.Unsupported, match="host tensors"):
        buffer.engram_write(storage.to("meta"))
    with pytest.raises(invalid, match="give the same"):
        buffer.engram_write(storage[comm.rank() :])
    buffer.engram_write(storage)
    buffer.pp_set_config(16, 1)
    buffer.agrs_set_config(64, 1)
    other = 1 - comm.rank()
    for words, call in [
        ("8 entries", lambda: buffer.engram_fetch(indices + 8)),
        ("8 entries", lambda: buffer.engram_fetch(indices - 1)),
        ("int32", lambda: buffer.engram_fetch(indices.long())),
        ("is 32", lambda: buffer.pp_send(torch.zeros(9), other)),
        ("not beside", lambda: buffer.pp_recv(torch.zeros(4), comm.rank())),
        ("no session", lambda: buffer.all_gather(tensor)),
        ("no session", buffer.destroy_agrs_session),
    ]:
        with pytest.raises(invalid, match=words):
            call()
    buffer.create_agrs_session()
    with pytest.raises(invalid, match="session is open"):
        buffer.create_agrs_session()
    with pytest.raises(invalid, match="num_max_session_bytes"):
        buffer.all_gather(torch.zeros(9))
    _, late = buffer.all_gather(tensor)
    with pytest.raises(invalid, match="1 of 1 gathers"):
        buffer.all_gather(tensor)
    buffer.destroy_agrs_session()
    with pytest.raises(invalid, match="has ended"):
        late()
    comm.all_gather(b"")
    if comm.rank() == 0:
        # A receiver that frees no slot, and a sender that sends nothing, are named.
        buffer.pp_send(torch.zeros(4), 1)
        with pytest.raises(errors.PeerLost, match="rank 1 did not send within 2 s"):
            buffer.pp_send(torch.zeros(4), 1)
        with pytest.raises(errors.PeerLost, match="rank 1"):
            buffer.pp_recv(torch.zeros(4), 1)
    comm.all_gather(b"")
    buffer.destroy()
