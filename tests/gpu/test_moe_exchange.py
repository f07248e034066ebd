"""Exchanges of tokens on a GPU: several ranks, a process each, on one GPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.gpu.moe_rank import EXPERTS, HIDDEN, TOKENS, TOPK, Options, serve
from tests.moe_ranks import batch, expert
from tests.processes import Other, within

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LIMIT = 120.0


@contextlib.contextmanager
def ranks(
    transport: str, on_gpu: Sequence[bool], options: Sequence[Options] | None = None
) -> Iterator[list[Other]]:
    each = options or [{}] * len(on_gpu)
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(Other(serve, rank, len(on_gpu), transport, gpu, each[rank]))
            for rank, gpu in enumerate(on_gpu)
        ]
        cards = [other.hear(LIMIT) for other in others]
        for other in others:
            other.say(cards)
        for other in others:
            other.hear(LIMIT)
        yield others


def wanted(seed: int, gone: range = range(0)) -> torch.Tensor:
    """The sums in one place, without the experts that are gone."""
    x, idx, w = batch(seed, TOKENS, EXPERTS, TOPK, HIDDEN)
    out = torch.zeros(x.shape)
    for t in range(TOKENS):
        for k in range(TOPK):
            number = int(idx[t, k])
            if number >= 0 and number not in gone:
                out[t] += w[t, k] * expert(number, x[t]).float()
    return out.to(torch.bfloat16)


def run(others: Sequence[Other], seed: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    for rank, other in enumerate(others):
        other.say(("run", seed + rank))
    return [other.hear(LIMIT) for other in others]


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_sums_have_the_bits_of_one_place(transport: str) -> None:
    with ranks(transport, [True, True]) as others:
        for seed in (0, 10, 20):
            for rank, (sums, left_out) in enumerate(run(others, seed)):
                assert torch.equal(sums, wanted(seed + rank))
                assert left_out == ()


def test_ranks_on_a_gpu_and_on_the_host_are_one_exchange() -> None:
    with ranks("tcp", [True, False]) as others:
        for rank, (sums, _) in enumerate(run(others, 30)):
            assert torch.equal(sums, wanted(30 + rank))


def is_straight(other: Other) -> bool:
    return "stored by this rank's kernels" in other.ask(("explain",), LIMIT)


@pytest.mark.parametrize("direct", [(True, True), (True, False)], ids=str)
@pytest.mark.parametrize("private_rows", [0, 8, 1024])
def test_rows_and_answers_are_stored_straight_to_the_peer(
    direct: tuple[bool, bool], private_rows: int
) -> None:
    each: list[Options] = [{"direct": d, "private_rows": private_rows} for d in direct]
    with ranks("cuda_ipc", [True, True], each) as others:
        for other, stores in zip(others, direct, strict=True):
            if stores:
                within(LIMIT, "the peer can be stored to", functools.partial(is_straight, other))
            else:
                assert not is_straight(other)
        for seed in (0, 10, 20):
            for rank, (sums, left_out) in enumerate(run(others, seed)):
                assert torch.equal(sums, wanted(seed + rank))
                assert left_out == ()
        began = time.perf_counter()
        for seed in range(30, 80, 10):
            run(others, seed)
        each_ms = (time.perf_counter() - began) / 5 * 1e3
        print(f"    direct {direct}: 5 exchanges, {each_ms:.1f} ms each")


def test_rs_4_a_graph_is_replayed_after_its_exchange_is_gone() -> None:
    with ranks("cuda_ipc", [True]) as (alone,):
        run([alone], 0)
        alone.ask(("capture",), LIMIT)
        run([alone], 10)
        # A wait that isn't ended takes longer than is waited for here.
        alone.ask(("orphan", 20), LIMIT)


def test_a_captured_exchange_serves_other_tokens() -> None:
    with ranks("cuda_ipc", [True, True]) as others:
        run(others, 0)
        for other in others:
            other.ask(("capture",), LIMIT)
        began = time.perf_counter()
        for seed in range(10, 60, 10):
            for rank, (sums, _) in enumerate(run(others, seed)):
                assert torch.equal(sums, wanted(seed + rank))
        print(f"    5 replays, {(time.perf_counter() - began) / 5 * 1e3:.1f} ms each")


def test_rs_4_a_rank_that_is_killed_is_left_out() -> None:
    with ranks("cuda_ipc", [True, True]) as (one, dying):
        run([one, dying], 0)
        one.say(("run", 10))
        dying.kill()
        began = time.monotonic()
        sums, left_out = one.hear(LIMIT)
        print(f"    over {time.monotonic() - began:.2f} s after kill -9")
        assert torch.equal(sums, wanted(10, range(EXPERTS // 2, EXPERTS)))
        assert left_out == (1,)
        # The context stays usable.
        sums, _ = one.ask(("run", 20), LIMIT)
        assert torch.equal(sums, wanted(20, range(EXPERTS // 2, EXPERTS)))
        assert one.ask(("stop",), LIMIT) == [1]
