"""Exchanges that kernels carry out, run on the processor, against those of native/moe."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import AllToAll, RowPart, cast, device
from fabric_ray.moe.tokens import Outgoing, Room
from tests.examples import by_turns
from tests.host_kernels import Host
from tests.moe_ranks import ThreadComm, batch, layer, on_all_ranks, rank_of, unsharded
from tests.unit.moe.moe_ranks import joined, on_each

LIMIT = 60.0


def group(
    host: Host, kernels: Sequence[bool], **options: Any
) -> AbstractContextManager[list[AllToAll]]:
    """Ranks that know one another, with kernels or without."""
    return joined([host.another() if on_kernels else None for on_kernels in kernels], **options)


@pytest.mark.parametrize("stride", [None, 18])
def test_tokens_and_their_scales_come_as_they_do_without_kernels(
    host: Host, stride: int | None
) -> None:
    parts = [RowPart("scales", 3, torch.float32), RowPart("number", 1, torch.int16)]
    options: dict[str, Any] = {
        "experts": 4,
        "topk": 2,
        "hidden": 48,
        "max_tokens": 9,
        "dtype": torch.float8_e4m3fn,
        "answer_dtype": torch.float32,
        "parts": parts,
        "private_rows": 2,
    }

    def work(a: AllToAll) -> list[torch.Tensor]:
        x, idx, w = batch(a.rank, 9, 4, 2, 48)
        number = torch.arange(9, dtype=torch.int16)[:, None] + 100 * a.rank
        scales = torch.rand(9, 3, generator=torch.Generator().manual_seed(a.rank))
        a.dispatch_send(x.to(torch.float8_e4m3fn), idx, scales=scales, number=number)
        got = a.dispatch_recv(multiple=8, stride=stride)
        found = [got.counts, got.starts]
        for local in range(2):
            of = got.of(local)
            found += [got.x[of].view(torch.uint8), got.parts["scales"][of], got.parts["number"][of]]
        y = got.x.float() * 3
        a.combine_send(y)
        single = a.combine_answers()
        return [*found, single, a.combine_recv(w), single]

    with group(host, (False, False), **options) as plain:
        wanted = on_each(plain, work)
    with group(host, (True, True), **options) as ranks:
        for ours, theirs in zip(on_each(ranks, work), wanted, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shared_rows", "kernels"),
    by_turns([1, 3, 7], [(True, True, True), (False, True, True)]),
    ids=str,
)
def test_rows_and_answers_come_in_turns_where_the_shared_buffer_is_small(
    host: Host, kernels: tuple[bool, ...], shared_rows: int
) -> None:
    sizes = {"experts": 3, "topk": 2, "hidden": 8, "max_tokens": 7}
    room = {"private_rows": 1, "shared_rows": shared_rows}
    with group(host, kernels, **sizes, **room) as ranks:

        def work(a: AllToAll) -> None:
            for turn, tokens in enumerate([7, 2, 7]):
                x, idx, w = batch(turn * 10 + a.rank, tokens, 3, 2, 8)
                assert torch.equal(layer(a, x, idx, w, 4), unsharded(x, idx, w))

        on_each(ranks, work)


@pytest.mark.parametrize("step", ["before", "after dispatch_send", "before combine"])
def test_rs_4_a_rank_that_is_gone_is_left_out_and_named(host: Host, step: str) -> None:
    sizes = {"experts": 6, "topk": 3, "hidden": 16, "max_tokens": 6}
    engines: list[TransferEngine] = []
    with group(host, (True, False, True), engines=engines, timeout=20.0, **sizes) as ranks:
        dying = ranks[2]
        gone = dying.local_experts

        def work(a: AllToAll) -> None:
            x, idx, w = batch(a.rank, 6, 6, 3, 16)
            assert torch.equal(layer(a, x, idx, w, 4), unsharded(x, idx, w))
            x, idx, w = batch(10 + a.rank, 6, 6, 3, 16)
            if a is dying:
                if step != "before":
                    a.dispatch_send(x, idx)
                if step == "before combine":
                    a.dispatch_recv()
                engines[2].close()
                return
            assert torch.equal(layer(a, x, idx, w, 4), unsharded(x, idx, w, gone))
            assert a.left_out == (2,)
            assert [lost.rank for lost in a.lost] == [2]
            x, idx, w = batch(20 + a.rank, 6, 6, 3, 16)
            assert torch.equal(layer(a, x, idx, w, 4), unsharded(x, idx, w, gone))

        on_each(ranks, work)


def test_a_rank_comes_anew(host: Host) -> None:
    sizes = {"experts": 4, "topk": 2, "hidden": 16, "max_tokens": 6}
    with group(host, (True, True), timeout=20.0, **sizes) as ranks:

        def work(a: AllToAll) -> None:
            x, idx, w = batch(a.rank, 6, 4, 2, 16)
            assert torch.equal(layer(a, x, idx, w, 4), unsharded(x, idx, w))

        on_each(ranks, work)
        ranks[0].mask(1, "the test said so")
        x, idx, w = batch(5, 6, 4, 2, 16)
        assert torch.equal(layer(ranks[0], x, idx, w, 4), unsharded(x, idx, w, range(2, 4)))
        assert ranks[0].present == (True, False)
        with TransferEngine(name="anew", transport="shm") as engine:
            anew = AllToAll(engine, rank=1, ranks=2, launcher=host.another(), **sizes)
            descriptor = ranks[0].descriptor(1)
            ranks[0].admit(anew.descriptor(0))
            anew.admit(descriptor)
            on_each([ranks[0], anew], work)


def test_rs_4_a_wait_ends_when_the_exchange_is_left(host: Host) -> None:
    """A silent rank that is not given up doesn't keep others from leaving."""
    with group(host, (True, True), experts=2, topk=1, hidden=8, max_tokens=4) as ranks:
        x, idx, _ = batch(0, 4, 2, 1, 8)
        ranks[0].dispatch_send(x, idx)
        waits = threading.Thread(target=ranks[0].dispatch_recv, daemon=True)
        waits.start()
        time.sleep(0.05)
        assert waits.is_alive()
        ranks[0].close()
        waits.join(LIMIT)
        assert not waits.is_alive()
        with pytest.raises(errors.Cancelled, match="closed"):
            ranks[0].combine_send(torch.zeros(8, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("bad", "said"),
    [(7, "index 1 of token 2 is no expert"), (0, "index 1 of token 2 is an expert that it has")],
)
def test_tokens_that_go_nowhere_are_told_and_the_others_go(host: Host, bad: int, said: str) -> None:
    with group(host, (True, True), experts=4, topk=2, hidden=8, max_tokens=4) as ranks:

        def work(a: AllToAll) -> None:
            x = torch.ones(4, 8, dtype=torch.bfloat16)
            idx = torch.tensor([[0, 1], [2, 3], [0, bad], [3, 1]])
            w = torch.ones(4, 2)
            a.dispatch_send(x, idx)
            with pytest.raises(errors.InvalidArgument, match=said):
                a.check()
            got = a.dispatch_recv()
            a.combine_send(got.x)
            assert a.combine_recv(w)[:, 0].tolist() == [2, 2, 1, 2]

        on_each(ranks, work)


def test_a_fault_is_held_back_until_its_exchange_is_over(host: Host) -> None:
    with group(host, (True,), experts=2, topk=1, hidden=8, max_tokens=4) as (a,):
        x, w = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 1)
        a.dispatch_send(x, torch.tensor([[0], [9]]))
        a._finish()
        a.combine_send(a.dispatch_recv().x)
        assert a.combine_recv(w)[:, 0].tolist() == [1, 0]
        right = torch.tensor([[0], [1]])
        with pytest.raises(errors.InvalidArgument, match="nothing of this dispatch_send was done"):
            a.dispatch_send(x, right)
        a.dispatch_send(x, right)
        a.combine_send(a.dispatch_recv().x)
        assert a.combine_recv(w)[:, 0].tolist() == [1, 1]
        a.check()


def test_mr_1_rows_that_have_not_left_stay_when_a_wait_is_aborted(host: Host) -> None:
    """The peer gives no room for the rest of the rows, and the next tokens come."""
    room = {"private_rows": 0, "shared_rows": 1}
    with group(
        host, (True, False), experts=2, topk=1, hidden=8, max_tokens=4, timeout=LIMIT, **room
    ) as (a, silent):
        x, to_peer = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.int64)
        silent.dispatch_send(x[:0], to_peer[:0])
        a.dispatch_send(x, to_peer)
        a.dispatch_recv()
        steps = a._steps
        assert steps is not None
        own = steps._rows(steps._row_stride).clone()
        assert own.any()
        waits = threading.Thread(target=a.dispatch_send, args=(3 * x, to_peer), daemon=True)
        waits.start()
        time.sleep(0.05)
        assert waits.is_alive()
        a.close()
        waits.join(LIMIT)
        assert not waits.is_alive()
        assert torch.equal(steps._rows(steps._row_stride), own)


@pytest.mark.parametrize("call", ["check", "left_out"])
def test_rs_1_a_device_that_has_waited_for_too_long_hands_out_nothing_and_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    sizes = {"experts": 2, "topk": 1, "hidden": 8, "max_tokens": 4}
    monkeypatch.setattr(device, "_DEVICE_TIMEOUTS", 1e-3)
    with group(host, (True, False), timeout=LIMIT, **sizes) as (a, _):
        x, idx, _w = batch(0, 4, 2, 1, 8)
        a.dispatch_send(x, idx)
        steps = a._steps
        assert steps is not None
        # As an exchange before would have left them.
        steps._box.tables["incoming"].fill_(1 << 32 | 1)
        steps._box.tables["missing"].fill_(0)
        given = torch.full((8, 8), 7, dtype=torch.bfloat16)
        got = steps.dispatch_recv(1, None, given)
        assert got.counts.tolist() == [0]
        assert (given == 7).all()
        with pytest.raises(errors.Cancelled, match="wait before HandedOut timed out"):
            a.check() if call == "check" else a.left_out
        with pytest.raises(errors.Cancelled):
            a.combine_send(got.x)


def test_a_host_that_does_not_follow_the_device_is_told_of(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"experts": 2, "topk": 1, "hidden": 8, "max_tokens": 4}
    with group(host, (True,), **sizes) as (a,):
        steps = a._steps
        assert steps is not None
        steps._box.pushers[0] += 1
        a.set_timeout(0.01)
        for wants in (lambda: a.left_out, a.descriptor, a.check):
            with pytest.raises(errors.Cancelled, match="host did not process"):
                wants()
        a.close()
        with pytest.raises(errors.Cancelled, match="closed"):
            a.check()


def test_tensors_whose_strides_mean_nothing_are_taken(host: Host) -> None:
    parts = [RowPart("scale", 1, torch.float32)]
    sizes = {"experts": 2, "topk": 1, "hidden": 8, "max_tokens": 4, "parts": parts}
    with group(host, (True,), **sizes) as (a,):
        for n in (4, 1, 0):
            x = torch.arange(n * 8, dtype=torch.bfloat16).view(n, 8)
            apart = torch.as_strided(x, (n, 8), (1, 1)) if n < 2 else x
            scale = torch.arange(4, dtype=torch.float32)[:n].as_strided((n, 1), (1, 4))
            idx = torch.zeros(n, 1, dtype=torch.int64)
            a.dispatch_send(apart, idx, scale=scale)
            got = a.dispatch_recv()
            assert torch.equal(got.parts["scale"][:n], scale)
            a.combine_send(got.x)
            weights = torch.ones(4, dtype=torch.float32)[:n].as_strided((n, 1), (1, 4))
            assert torch.equal(a.combine_recv(weights), x)
        a.check()


class Operations(TorchDispatchMode):
    """The operations of torch that are called, by the types that they are called for: a GPU loads a
    kernel for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[torch.dtype, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = (one.dtype for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        if not func.is_view:
            self.seen.add((str(func), tuple(dtypes)))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_kernels_that_copy_a_part_are_loaded_before_the_first_exchange(
    host: Host, dtype: torch.dtype, width: int
) -> None:
    sizes: dict[str, Any] = {"experts": 4, "topk": 2, "hidden": 16, "max_tokens": 6}
    parts = [RowPart("scale", width, dtype)]
    with Operations() as loaded, group(host, (True,), parts=parts, **sizes) as (a,):
        pass
    with group(host, (True,), parts=parts, **sizes) as (a,):
        x, idx, _ = batch(0, 6, 4, 2, 16)
        a.dispatch_send(x, idx, scale=torch.ones(6, width, dtype=dtype))
        got = a.dispatch_recv(stride=6)
        for into in (torch.zeros(4, 6, width, dtype=dtype), torch.zeros(4, width, 6).to(dtype).mT):
            with Operations() as called:
                got.copy_part("scale", into)
            assert int(into.sum()) == width * int(got.counts.sum())
            assert called.seen <= loaded.seen, called.seen - loaded.seen


def test_a_launch_that_fails_ends_the_exchange(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with group(host, (True,), experts=2, topk=1, hidden=8, max_tokens=4) as (a,):
        x, idx, _ = batch(0, 4, 2, 1, 8)
        steps = a._steps
        assert steps is not None

        def fails(*_: object, **__: object) -> None:
            raise errors.ResourceError("no launch any more")

        monkeypatch.setattr(steps._launches, "_launch", fails)
        with pytest.raises(errors.ResourceError):
            a.dispatch_send(x, idx)
        with pytest.raises(errors.Cancelled, match="closed"):
            a.dispatch_send(x, idx)


def test_one_thread_at_a_time_is_in_a_call(host: Host) -> None:
    with group(host, (True, True), experts=2, topk=1, hidden=8, max_tokens=4) as (a, _):
        x, idx, _w = batch(0, 4, 2, 1, 8)
        a.dispatch_send(x, idx)
        waits = threading.Thread(target=a.dispatch_recv, daemon=True)
        waits.start()
        time.sleep(0.05)
        assert waits.is_alive()
        with pytest.raises(errors.InvalidArgument, match="another thread is in a call"):
            a.dispatch_recv()
        a.close()
        waits.join(LIMIT)
        assert not waits.is_alive()


def test_more_ranks_than_commands_can_name_are_refused_first(host: Host) -> None:
    with (
        TransferEngine(name="many", transport="shm") as engine,
        pytest.raises(errors.InvalidArgument, match="1025 ranks; on a device there are 1024"),
    ):
        AllToAll(
            engine,
            rank=0,
            ranks=1025,
            experts=1025,
            topk=1,
            hidden=8,
            max_tokens=1,
            launcher=host.another(),
        )


class Recorder:
    """Launches, and keeps what was launched to launch it again, as a CUDA graph does."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.launches: list[tuple[Any, ...]] = []

    def launch(self, *launched: Any, **options: Any) -> None:
        self.launches.append(launched)
        self._host.launch(*launched, **options)

    def resident(self, *of: Any) -> int:
        return self._host.resident(*of)


def test_what_a_dispatch_waits_for_is_counted_where_a_graph_counts(host: Host) -> None:
    """A dispatch's launches are the same after an exchange with answers and after one without."""
    recorder = Recorder(host.another())
    with TransferEngine(name="alone", transport="shm") as engine:
        sizes: dict[str, Any] = {"experts": 2, "topk": 1, "hidden": 8, "max_tokens": 4}
        a = AllToAll(engine, rank=0, ranks=1, launcher=recorder, **sizes)
        x, idx, w = batch(0, 4, 2, 1, 8)
        words = []
        for combines in (True, False, False, True, True, False, True):
            recorder.launches.clear()
            a.dispatch_send(x, idx)
            _, _, _, _, arguments = recorder.launches[0]
            begin = arguments.step[0].arguments.begin
            words.append((begin.over, begin.values))
            got = a.dispatch_recv()
            if combines:
                a.combine_send(got.x)
                a.combine_recv(w)
        a.check()
        assert len({*words}) == 1
        a.close()


def test_what_does_not_fit_is_refused_before_anything_is_launched(host: Host) -> None:
    with group(host, (True,), experts=2, topk=1, hidden=8, max_tokens=4) as (a,):
        x, idx, w = batch(0, 4, 2, 1, 8)
        for call, said in (
            (lambda: a.dispatch_recv(), "dispatch_send"),
            (lambda: a.combine_recv(w), "dispatch_send"),
            (lambda: a.dispatch_send(x.float(), idx), "bfloat16"),
            (lambda: a.dispatch_send(x, idx.float()), "integers"),
            (lambda: a.dispatch_send(x[:3], idx), "4 tokens"),
            (lambda: a.dispatch_send(x, idx, scales=w), "made of"),
            (lambda: a.dispatch_send(x.to("meta"), idx), "meta"),
            (lambda: a.dispatch_send(x.repeat(2, 1), idx.repeat(2, 1)), "max_tokens"),
        ):
            with pytest.raises(errors.InvalidArgument, match=said):
                call()
        a.dispatch_send(x, idx)
        with pytest.raises(errors.InvalidArgument, match=r"stride is 3, .* may get 4"):
            a.dispatch_recv(stride=3)
        with pytest.raises(errors.InvalidArgument, match="have 3 rows, and 4 are needed"):
            a.dispatch_recv(x=torch.empty(3, 8, dtype=torch.bfloat16))
        got = a.dispatch_recv()
        with pytest.raises(errors.InvalidArgument, match="answers"):
            a.combine_send(got.x[:-1])
        a.combine_send(got.x)
        with pytest.raises(errors.InvalidArgument, match="weights"):
            a.combine_recv(w.double())
        assert torch.equal(a.combine_recv(dtype=torch.float32), torch.where(idx >= 0, x.float(), 0))


@on_all_ranks(1)
def test_a_call_that_is_refused_before_its_launch_can_be_made_again(
    comm: ThreadComm, host: Host
) -> None:
    parts = [RowPart("scales", 2, torch.float32)]
    sizes = {"experts": 3, "topk": 2, "hidden": 256, "max_tokens": 5, "parts": parts}
    a = rank_of(AllToAll, comm, dtype=torch.float8_e4m3fn, launcher=host.another(), **sizes)
    x, idx, _ = batch(0, 5, 3, 2, 256)
    with pytest.raises(errors.InvalidArgument, match="in blocks of 64"):
        a.dispatch(Outgoing(x, idx, {}, cast.Fp8Form(64)))
    a.dispatch(Outgoing(x, idx, {}, cast.Fp8Form(128)))
    counts, layout = torch.empty(3, dtype=torch.int32), torch.empty(3, 1, dtype=torch.int64)
    by_rows = torch.empty(3, 5, 2)
    with pytest.raises(errors.InvalidArgument, match="each one's rows behind one another"):
        a.dispatch_recv_into(Room({"scales": by_rows}, counts, layout), 5)
    with pytest.raises(errors.InvalidArgument, match=r"given are torch\.int64"):
        a.dispatch_recv_into(Room({}, counts.long(), layout), 5)
    by_columns = torch.empty(3, 2, 5).transpose(1, 2)
    a.dispatch_recv_into(Room({"scales": by_columns}, counts, layout), 5)
    a.check()
    assert counts.tolist() == [int((idx == e).sum()) for e in range(3)]
