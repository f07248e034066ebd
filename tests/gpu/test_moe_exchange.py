"""Exchanges of tokens on a GPU: several ranks, a process each, on one GPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.exchange_cases import CASES, EXPERTS, MAX_TOKENS, TOPK, Case
from tests.exchange_checks import LIMIT, begin, check_case, expect, ranks, run
from tests.gpu import figures
from tests.processes import Other, within
from tests.stands import NoKernels, OnGpu, Stand

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PLAIN = CASES[0]


class Pool:
    """Ranks that go from test to test: a process takes longer to start than a case. After one that
    failed there are new ones."""

    def __init__(self) -> None:
        self._key: object = None
        self._stack = contextlib.ExitStack()
        self._ranks: list[Other] = []

    @contextlib.contextmanager
    def of(self, transport: str, *stands: Callable[[], Stand]) -> Iterator[list[Other]]:
        if self._key != (transport, stands):
            self.close()
            self._ranks = self._stack.enter_context(ranks(transport, stands))
            self._key = (transport, stands)
        try:
            yield self._ranks
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._key = None
        self._stack.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def timed(others: Sequence[Other], seeds: Sequence[int]) -> float:
    """Milliseconds of an exchange, the way there and back to the test included."""
    began = time.perf_counter()
    for seed in seeds:
        run(others, seed)
    return (time.perf_counter() - began) / len(seeds) * 1e3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_sums_have_the_bits_of_one_place_and_are_captured(
    pool: Pool, transport: str, case: Case
) -> None:
    with pool.of(transport, OnGpu, OnGpu) as others:
        check_case(others, case)
        figures.note(f"exchange/{transport}/{case.name}/replay ms", timed(others, range(6, 11)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_on_a_gpu_and_on_the_host_are_one_exchange(pool: Pool, case: Case) -> None:
    with pool.of("tcp", OnGpu, NoKernels) as others:
        check_case(others, case, captured=False)


def is_straight(other: Other) -> bool:
    return "stored by this rank's kernels" in other.ask(("explain",), LIMIT)


@pytest.mark.parametrize("direct", [(True, True), (True, False)], ids=str)
@pytest.mark.parametrize("private_rows", [0, 8, MAX_TOKENS * TOPK])
def test_rows_and_answers_are_stored_straight_to_the_peer(
    pool: Pool, direct: tuple[bool, bool], private_rows: int
) -> None:
    options: list[dict[str, Any]] = [{"direct": d, "private_rows": private_rows} for d in direct]
    with pool.of("cuda_ipc", OnGpu, OnGpu) as others:
        begin(others, [replace(PLAIN, options=each) for each in options])
        for other, stores in zip(others, direct, strict=True):
            if stores:
                within(LIMIT, "the peer can be stored to", functools.partial(is_straight, other))
            else:
                assert not is_straight(other)
        for seed in range(3):
            expect(others, PLAIN, seed)
        figures.note(f"direct {direct}, {private_rows} private rows ms", timed(others, range(3, 8)))


def test_rs_4_a_graph_is_replayed_after_its_exchange_is_gone(pool: Pool) -> None:
    with pool.of("cuda_ipc", OnGpu) as (alone,):
        begin([alone], [PLAIN])
        run([alone], 0)
        alone.ask(("capture", 1), LIMIT)
        run([alone], 2)
        # A wait that isn't ended takes as long as a device has patience.
        began = time.monotonic()
        alone.ask(("orphan", 3), LIMIT)
        figures.note("orphan replay s", time.monotonic() - began)
        pool.close()


def test_rs_4_a_rank_that_is_killed_is_left_out() -> None:
    gone = range(EXPERTS // 2, EXPERTS)
    with ranks("cuda_ipc", [OnGpu, OnGpu]) as (one, dying):
        begin([one, dying], [PLAIN, PLAIN])
        expect([one, dying], PLAIN, 0)
        one.say(("run", 1))
        dying.kill()
        began = time.monotonic()
        sums, left_out = one.hear(LIMIT)
        figures.note("over s after kill -9", time.monotonic() - began)
        assert torch.equal(sums, PLAIN.wanted(1, 0, gone))
        assert left_out == (1,)
        # The context stays usable.
        sums, _ = one.ask(("run", 2), LIMIT)
        assert torch.equal(sums, PLAIN.wanted(2, 0, gone))
        assert one.ask(("stop",), LIMIT) == [1]
