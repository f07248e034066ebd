"""Kernels that store rows and answers straight to peers' memory, run on the processor over shm."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric_ray import TransferEngine, errors
from fabric_ray.kernels import structs
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.moe import STORED
from fabric_ray.kernels.steps import StepKind
from fabric_ray.moe import AllToAll, device_memory
from tests.direct_rank import EXPERTS, HIDDEN, TOKENS, TOPK, is_straight, serve
from tests.examples import by_turns
from tests.host_graph import Graph
from tests.host_kernels import Host, StepByStep
from tests.moe_ranks import batch, expert, layer, unsharded
from tests.processes import Other, within
from tests.unit.moe.moe_ranks import joined, on_each

LIMIT = 60.0
SIZES: dict[str, Any] = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
#: The content of memory before any write.
BLANK = 0x5A


#: What a rank is: on kernels that store directly or don't, or without kernels.
DIRECT, KERNELS, PLAIN = "direct", "kernels", "plain"


@contextmanager
def group(
    host: Host, kinds: Sequence[str], *, wrap: Callable[[int, Host], Launcher] | None = None,
    transport: str = "shm", **options: Any,
) -> Iterator[list[AllToAll]]:  # fmt: skip
    """Ranks that know one another, and which way rows go."""
    launchers: list[Launcher | None] = []
    for rank, kind in enumerate(kinds):
        own = None if kind == PLAIN else host.another()
        launchers.append(own if own is None or wrap is None else wrap(rank, own))
    stores = [kind == DIRECT for kind in kinds]
    with joined(launchers, direct=stores, transport=transport, **{**SIZES, **options}) as ranks:
        for a in ranks if transport == "shm" else ():
            if stores[a.rank]:
                within(LIMIT, "all can be stored to", functools.partial(is_straight, a))
        yield ranks


def given(seed: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch(seed, tokens, EXPERTS, TOPK, HIDDEN)


MIXES = [
    (DIRECT, DIRECT),
    (DIRECT, DIRECT, DIRECT),
    (DIRECT, PLAIN),
    (DIRECT, KERNELS, PLAIN),
]


@pytest.mark.parametrize(("kinds", "private"), by_turns(MIXES, [0, 2, 64]), ids=str)
def test_ranks_that_store_and_ranks_that_do_not_are_one_exchange(
    host: Host, kinds: tuple[str, ...], private: int
) -> None:
    with group(host, kinds, private_rows=private) as ranks:

        def work(a: AllToAll) -> None:
            for turn, tokens in enumerate([TOKENS, 0, 1, 7]):
                x, idx, w = given(turn * 10 + a.rank, tokens)
                assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w))
                a.check()
            assert a.left_out == ()

        on_each(ranks, work)


def test_combine_may_be_left_out_and_comes_again(host: Host) -> None:
    with group(host, (DIRECT, PLAIN, DIRECT)) as ranks:

        def work(a: AllToAll) -> None:
            for turn in range(6):
                x, idx, w = given(turn * 10 + a.rank)
                if turn % 3 == 2:
                    assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w))
                else:
                    a.dispatch_send(x, idx)
                    a.dispatch_recv()

        on_each(ranks, work)


def test_rows_and_answers_go_straight_without_a_copy_between(host: Host) -> None:
    """Neither a rank's own rows nor its shared buffer hold what goes to its peer. Answers never
    wait: to a peer that has not taken its rows they go by the buffer. It is enough if they went
    straight in one of many exchanges."""
    with group(host, (DIRECT, DIRECT), private_rows=64) as ranks:
        half = EXPERTS // 2
        both = threading.Barrier(2)

        def work(a: AllToAll) -> bool:
            steps = a._steps
            assert steps is not None
            x, idx, w = given(a.rank)
            # All to the other rank.
            to = torch.stack([torch.randperm(half) for _ in range(TOKENS)])[:, :TOPK]
            idx = (1 - a.rank) * half + to
            own = steps._rows(steps._row_stride)
            own.fill_(BLANK)
            both.wait(LIMIT)
            a.dispatch_send(x, idx)
            assert (own == BLANK).all(), "rows were packed here first"
            got = a.dispatch_recv()
            y = torch.zeros_like(got.x)
            for local, number in enumerate(a.local_experts):
                y[got.of(local)] = expert(number, got.x[got.of(local)])
            start = next(nbytes for name, _, nbytes in a._native.areas if name == "private")
            shared = steps._memory[start : steps._own]
            shared.fill_(BLANK)
            both.wait(LIMIT)
            a.combine_send(y)
            straight = bool((shared == BLANK).all())
            assert torch.equal(a.combine_recv(w), unsharded(x, idx, w))
            return straight

        assert any(all(on_each(ranks, work)) for _ in range(50))


def test_rs_2_explain_counts_the_rows_that_kernels_stored(host: Host) -> None:
    private = 4
    with group(host, (DIRECT, DIRECT), private_rows=private) as ranks:
        none = f"stored by this rank's kernels, at most {private} of a dispatch: 0 of 0 rows so far"
        assert all(f"rows to rank {1 - a.rank}: {none}" in a.explain() for a in ranks)
        local = EXPERTS // 2
        x, idx, w = batch(0, TOKENS, EXPERTS, TOPK, HIDDEN)

        def work(a: AllToAll) -> str:
            for _ in range(2):
                layer(a, x, idx, w)
            return a.explain()

        for rank, text in enumerate(on_each(ranks, work)):
            away = int(((idx >= 0) & (idx // local != rank)).sum())
            assert away > private
            assert (
                f": {2 * private} of {2 * away} rows so far, the engine writes the others" in text
            )


def test_rs_2_explain_says_which_way_rows_go_and_why(host: Host) -> None:
    with group(host, (DIRECT, KERNELS, PLAIN)) as (direct, kernels, plain):
        assert "rows to rank 1: stored by this rank's kernels" in direct.explain()
        assert "rows to rank 2: stored by this rank's kernels" in direct.explain()
        assert "rows to rank 0: written by the engine: direct stores are turned off" in (
            kernels.explain()
        )
        assert "rows to rank 0: written by the engine: no kernels" in plain.explain()
        direct.mask(2)
        assert "rows to rank 2: the rank is not present" in direct.explain()
    with group(host, (DIRECT, PLAIN), transport="tcp") as (far, _):
        within(LIMIT, "the way is known", lambda: "not known yet" not in far.explain())
        assert "written by the engine: tcp has no memory of the peer's within reach" in (
            far.explain()
        )


class Stalling(StepByStep):
    """Stands still before the first step of a kind that stores to a peer, until it is let go."""

    def __init__(self, host: Host, kind: StepKind) -> None:
        super().__init__(host)
        self._kind = kind
        self.stands, self.go = threading.Event(), threading.Event()

    def step(self, step: structs.Step, launch: Callable[[], None]) -> None:
        if step.kind == self._kind and self._stores(step.arguments):
            self.stands.set()
            assert self.go.wait(LIMIT)
        launch()

    def _stores(self, arguments: Any) -> bool:
        if self._kind == StepKind.PACK_ROWS:
            return ctypes.c_uint64.from_address(arguments.pack.ways).value > 0
        chunks = arguments.answers.chunks
        n = ctypes.c_uint32.from_address(chunks.n).value
        words = (ctypes.c_uint64 * (3 * n)).from_address(chunks.chunk)
        return any(words[3 * i + 2] & STORED for i in range(n))


@contextmanager
def stalled_in(
    host: Host, kind: StepKind
) -> Iterator[tuple[TransferEngine, AllToAll, Callable[[], None]]]:
    """The engine of a rank that stands still in a kernel that stores to another; that one, which
    has masked it; and what lets it go on and end."""
    engines: list[TransferEngine] = []
    stalls: list[Stalling] = []

    def wrap(_: int, own: Host) -> Launcher:
        stalls.append(Stalling(own, kind))
        return stalls[-1]

    with group(host, (DIRECT, PLAIN), wrap=wrap, engines=engines, timeout=LIMIT) as (stalled, a):
        (stall,) = stalls

        def exchange(rank: AllToAll) -> None:
            # A call may raise when the other rank is masked or closed.
            with contextlib.suppress(errors.FabricError):
                while not stall.stands.is_set():
                    layer(rank, *given(rank.rank))

        both = [threading.Thread(target=exchange, args=(rank,)) for rank in (stalled, a)]
        for one in both:
            one.start()
        assert stall.stands.wait(LIMIT)
        a.set_timeout(0.2)
        a.mask(0, "it stands still")
        both[1].join(LIMIT)

        def ends() -> None:
            stall.go.set()
            with contextlib.suppress(errors.FabricError):
                stalled.mask(1, "it has masked this one")
            both[0].join(LIMIT)
            assert not both[0].is_alive()

        try:
            yield engines[0], a, ends
        finally:
            stall.go.set()


@pytest.mark.parametrize("kernel", [StepKind.PACK_ROWS, StepKind.PACK_ANSWERS])
def test_mr_1_memory_that_a_stalled_rank_may_store_to_is_not_used_again(
    host: Host, kernel: str
) -> None:
    """The rank is masked and lives; late stores of its kernel do no harm."""
    with stalled_in(host, kernel) as (_, a, ends):
        x, idx, w = given(0)
        with pytest.raises(errors.NotQuiesced):
            a.dispatch_send(x, idx)
        a.set_timeout(LIMIT)
        ends()
        gone = range(EXPERTS // 2)
        for seed in range(3):
            x, idx, w = given(seed)
            assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w, gone))


def test_mr_1_a_rank_that_comes_anew_is_shown_no_memory_that_its_earlier_kernel_stores_to(
    host: Host,
) -> None:
    with stalled_in(host, StepKind.PACK_ROWS) as (_, a, ends):
        with pytest.raises(errors.NotQuiesced, match="rank 0"):
            a.descriptor(0)
        with TransferEngine(name="rank-0-new", transport="shm") as engine:
            new = AllToAll(engine, rank=0, ranks=2, timeout=LIMIT, **SIZES)
            with pytest.raises(errors.FabricError, match="no memory for rank 0"):
                new.admit(a.descriptor())
            a.set_timeout(LIMIT)
            ends()
            descriptor, theirs = new.descriptor(), a.descriptor(0)
            new.admit(theirs)
            a.admit(descriptor)

            def work(rank: AllToAll) -> None:
                x, idx, w = given(77 + rank.rank)
                assert torch.equal(layer(rank, x, idx, w), unsharded(x, idx, w))

            on_each([new, a], work)
            assert a.left_out == new.left_out == ()


def test_rs_1_rows_of_a_receive_that_failed_are_there_in_the_next_one(host: Host) -> None:
    """Rows come in rounds. After the first ones, memory that a masked rank may store to is in the
    way."""
    stalls: list[Stalling] = []

    def wrap(_: int, own: Host) -> Launcher:
        stalls.append(Stalling(own, StepKind.PACK_ROWS))
        return stalls[-1]

    rounds = {"private_rows": 1, "shared_rows": 1}
    with group(host, (DIRECT, PLAIN, PLAIN), wrap=wrap, timeout=LIMIT, **rounds) as ranks:
        gone, (stalled, a, other) = range(EXPERTS // 3), ranks
        sums: dict[int, Tensor] = {}

        def exchange(rank: AllToAll) -> None:
            with contextlib.suppress(errors.FabricError):
                sums[rank.rank] = layer(rank, *given(rank.rank))

        threads = [threading.Thread(target=exchange, args=(rank,)) for rank in (stalled, other)]
        x, idx, w = given(1)
        a.dispatch_send(x, idx)

        receives = threading.Event()

        def masked() -> None:
            assert receives.wait(LIMIT)
            threads[0].start()
            # The shared row is offered to the first whose routes come, and rank 2 waits for it.
            within(LIMIT, "rank 0 sends routes", lambda: a.wait_times[0] > 0)
            threads[1].start()
            within(LIMIT, "rank 2 sends rows", lambda: a.wait_times[2] > 0)
            assert stalls[0].stands.wait(LIMIT)
            a.set_timeout(0.5)
            a.mask(0, "it stands still")

        masking = threading.Thread(target=masked)
        masking.start()
        # Only what comes after the receive has begun counts in its times.
        receives.set()
        try:
            with pytest.raises(errors.NotQuiesced):
                a.dispatch_recv()
        finally:
            masking.join()
            a.set_timeout(LIMIT)
            other.mask(0, "it stands still")
            stalls[0].go.set()
        got = a.dispatch_recv()
        y = torch.zeros(len(got.x), HIDDEN, dtype=torch.bfloat16)
        for local, number in enumerate(a.local_experts):
            y[got.of(local)] = expert(number, got.x[got.of(local)])
        a.combine_send(y)
        assert torch.equal(a.combine_recv(w), unsharded(x, idx, w, gone))
        for rank in (1, 2):
            with contextlib.suppress(errors.FabricError):
                stalled.mask(rank, "it has masked this one")
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert torch.equal(sums[2], unsharded(*given(2), gone))


def test_an_engine_that_is_closed_in_a_kernel_lets_go_when_that_has_ended(host: Host) -> None:
    with stalled_in(host, StepKind.PACK_ROWS) as (engine, a, ends):
        engine.close()
        x, idx, w = given(1)
        with pytest.raises(errors.NotQuiesced):
            a.dispatch_send(x, idx)
        a.set_timeout(LIMIT)
        ends()
        assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w, range(EXPERTS // 2)))


@pytest.mark.parametrize("private", [2, pytest.param(64, marks=pytest.mark.long)])
def test_rs_4_a_rank_that_waits_for_another_is_not_given_up(host: Host, private: int) -> None:
    """Present ranks get their rows, even if another rank is late."""
    with group(host, (DIRECT, DIRECT, DIRECT), private_rows=private, timeout=3.0) as ranks:
        on_each(ranks, lambda a: layer(a, *given(a.rank)))
        gone = range(2 * EXPERTS // 3, EXPERTS)

        def work(a: AllToAll) -> None:
            x, idx, w = given(10 + a.rank)
            assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w, gone))
            assert [lost.rank for lost in a.lost] == [2]

        on_each(ranks[:2], work)


def test_mr_1_a_rank_that_stands_between_its_calls_lets_go_at_once(host: Host) -> None:
    """It has no stores under way, so no rank waits for it."""
    with group(host, (DIRECT, PLAIN)) as (silent, a):
        x, idx, w = given(0)

        def dispatch(rank: AllToAll) -> None:
            rank.dispatch_send(x, idx)
            rank.dispatch_recv()

        on_each([silent, a], dispatch)
        a.mask(0, "it says nothing")
        a.set_timeout(LIMIT)
        assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w, range(EXPERTS // 2)))
        assert "its owner has revoked it" in silent.explain()


@pytest.mark.parametrize(
    ("kernel", "private"),
    [
        (StepKind.PACK_ROWS, 2),
        (StepKind.PACK_ANSWERS, 64),
        pytest.param(StepKind.PACK_ROWS, 64, marks=pytest.mark.long),
        pytest.param(StepKind.PACK_ANSWERS, 2, marks=pytest.mark.long),
    ],
)
def test_rs_4_a_rank_that_is_killed_while_it_stores_is_left_out(
    host: Host, build: Path, kernel: str, private: int
) -> None:
    """Rows that it had stored belong to no token, and stores to its memory have no effect."""
    with ExitStack() as stack:
        others = [
            stack.enter_context(
                Other(serve, rank, 3, build, kernel if rank == 2 else None, private)
            )
            for rank in range(3)
        ]
        descriptors = [other.hear(LIMIT) for other in others]
        for other in others:
            other.say(descriptors)
        for other in others:
            other.hear(LIMIT)
        dying = range(2 * EXPERTS // 3, EXPERTS)
        lives = others[:2]
        for other in others:
            other.say(0)
        for rank, other in enumerate(others):
            sums, left_out, _ = other.hear(LIMIT)
            assert torch.equal(sums, unsharded(*given(rank)))
            assert left_out == ()
        for seed in (10, 20, 30):
            for other in others if seed == 10 else lives:
                other.say(seed)
            for rank, other in enumerate(lives):
                sums, left_out, lost = other.hear(LIMIT)
                assert lost == [2]
                assert left_out == (2,)
                assert torch.equal(sums, unsharded(*given(seed + rank), dying))
        others[2].process.join(LIMIT)
        assert others[2].process.exitcode == -9


def test_a_graph_that_outlives_its_exchange_moves_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it uses is kept, every wait of its ends at once, its peer's rows stay as they are."""
    monkeypatch.setattr(device_memory, "is_captured", lambda _: True)
    monkeypatch.setattr(device_memory, "_KEPT_FOR_GRAPHS", [])
    graphs = [Graph(), Graph()]
    room = 2 * TOKENS
    # A replay reads and writes them again.
    kept_for_replays: list[tuple[Tensor, ...]] = []

    def wrap(rank: int, own: Host) -> Launcher:
        return graphs[rank].launcher(own)

    with group(host, (DIRECT, DIRECT), wrap=wrap) as ranks:

        def work(a: AllToAll) -> None:
            x, idx, w = given(a.rank)
            out = torch.zeros_like(x)
            kept_for_replays.append((x, idx, w, out))
            with graphs[a.rank].capture():
                a.dispatch_send(x, idx)
                got = a.dispatch_recv(stride=room)
                each = enumerate(a.local_experts)
                a.combine_send(
                    torch.cat([expert(n, got.x[i * room : (i + 1) * room]) for i, n in each])
                )
                a.combine_recv(w, out=out)
            assert torch.equal(out, unsharded(x, idx, w))

        def both(work: Callable[[AllToAll], Any]) -> Tensor:
            """What lies in the second rank's rows after that."""
            steps = ranks[1]._steps
            assert steps is not None
            steps._memory.fill_(BLANK)
            on_each(ranks, work)
            return steps._memory

        stored = both(work)
        assert not (stored == BLANK).all()
        assert not (both(lambda a: graphs[a.rank].replay()) == BLANK).all(), "nothing was replayed"
        steps = ranks[0]._steps
        assert steps is not None
        box = weakref.ref(steps._box)
        del steps
        ranks[0] = ranks[1]
        gc.collect()
        kept = box()
        assert kept is not None
        assert kept.aborted
        stored.fill_(BLANK)
        graphs[0].replay()
        assert int(kept.gate) == 0, "a wait was not ended"
        assert (stored == BLANK).all(), "it stored to its peer"
