"""High-throughput exchanges whose rows kernels move, run on the processor, against those of the
host and sums made by torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe import RowPart, ThroughputAllToAll
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from tests.examples import by_turns
from tests.host_kernels import Host, Stream, launching
from tests.moe_ranks import ThreadComm, batch, expert, on_all_ranks, on_ranks, rank_of
from tests.throughput_ranks import HIDDEN, SOURCE, hierarchical, layer, throughput_rank

LIMIT = 60.0


def kernels_of(
    host: Host, comm: ThreadComm, on_kernels: Sequence[bool], workers: int = 1
) -> dict[str, Any]:
    """Options of a rank, with kernels if it is its turn."""
    return launching(host, comm.stack, workers) if on_kernels[comm.rank()] else {}


def rank_on(
    host: Host, comm: ThreadComm, on_kernels: Sequence[bool], transport: str = "shm", **options: Any
) -> ThroughputAllToAll:
    kernels = kernels_of(host, comm, on_kernels, options.pop("workers", 1))
    return throughput_rank(comm, transport, **kernels, **options)


def routing(turn: int, rank: int, experts: int, topk: int) -> tuple[torch.Tensor, ...]:
    """Some tokens, none, one, as many as there may be with all going to one expert, holes only."""
    tokens = (23 + rank, 0, 1, 32, 9)[turn]
    x, idx, w = batch(turn * 9 + rank, tokens, experts, topk, HIDDEN)
    if turn == 3:
        idx[:, 0], idx[:, 1:] = 1, -1
    if turn == 4:
        idx[:] = -1
    return x, idx, w


MIXES = [
    (2, 2, "shm", (True, True, True, True)),
    (2, 2, "shm", (True, False, False, True)),
    (2, 2, "tcp", (False, True, True, True)),
    (3, 1, "shm", (True, True, False)),
    (1, 2, "shm", (True, False)),
    (2, 1, "tcp", (True, True)),
    (1, 1, "shm", (True,)),
]


@pytest.mark.parametrize(("nodes", "per_node", "transport", "on_kernels"), MIXES, ids=str)
def test_ranks_with_kernels_and_without_are_one_exchange(
    host: Host, nodes: int, per_node: int, transport: str, on_kernels: Sequence[bool]
) -> None:
    ranks = nodes * per_node
    experts, topk = ranks * 2, min(3, ranks * 2)

    def work(comm: ThreadComm) -> None:
        options: dict[str, Any] = {
            "experts": experts,
            "topk": topk,
            "max_tokens": 32,
            "ranks_per_node": per_node,
            "parts": SOURCE,
        }
        one = rank_on(host, comm, on_kernels, transport, **options)
        for turn in range(5):
            x, idx, w = routing(turn, comm.rank(), experts, topk)
            want = hierarchical(x, idx, w, local=2, per_node=per_node, nodes=nodes)
            assert torch.equal(layer(one, x, idx, w), want)
        assert one.lost == ()

    on_ranks(ranks, work)


SHAPES = [
    # The smallest rings, odd rows, several parts of which none lies as another.
    {"chunk": 1, "ring_chunks": 2, "channels": 1, "workers": 1},
    {"chunk": 5, "ring_chunks": 3, "channels": 3, "threads": 2, "workers": 2},
    {"chunk": 64, "ring_chunks": 2, "channels": 2, "threads": 2, "workers": 3},
]


@pytest.mark.parametrize(
    ("shape", "answers"), by_turns(SHAPES, [torch.float32, torch.bfloat16, torch.float16]), ids=str
)
def test_what_comes_and_what_comes_back_has_the_bits_of_the_host(
    host: Host, shape: dict[str, Any], answers: torch.dtype
) -> None:
    ranks, experts, topk, hidden, tokens = 4, 8, 3, 21, 17
    parts = [RowPart("scales", 3, torch.float32), RowPart("number", 1, torch.int16)]
    options: dict[str, Any] = {
        "experts": experts,
        "topk": topk,
        "hidden": hidden,
        "max_tokens": tokens,
        "ranks_per_node": 2,
        "dtype": torch.float8_e4m3fn,
        "answer_dtype": answers,
        "parts": parts,
        **shape,
    }

    def work(comm: ThreadComm, on_kernels: Sequence[bool]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        one = rank_on(host, comm, on_kernels, **options)
        for turn in range(3):
            seed = 10 * turn + comm.rank()
            x, idx, w = batch(seed, tokens - turn, experts, topk, hidden)
            number = torch.arange(len(x), dtype=torch.int16)[:, None] + 100 * comm.rank()
            scales = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(seed))
            eighths = x.to(torch.float8_e4m3fn)
            weights = None if turn == 1 else w
            one.dispatch_send(eighths, idx, weights=weights, scales=scales, number=number)
            got = one.dispatch_recv(multiple=8, stride=tokens * ranks if turn else None)
            found += [got.counts, got.starts]
            y = torch.zeros(len(got.x), hidden, dtype=answers)
            for local in range(2):
                of = got.of(local)
                found += [got.x[of].view(torch.uint8), got.parts["scales"][of]]
                found.append(got.parts["number"][of])
                y[of] = (got.x[of].float() * (local + 3)).to(answers)
            if turn == 2:
                continue
            one.combine_send(y)
            found.append(one.combine_recv(dtype=torch.float32 if turn else None))
        return found

    wanted = on_ranks(ranks, lambda comm: work(comm, [False] * ranks))
    for on_kernels in ([True] * ranks, [True, True, False, True]):
        got = on_ranks(ranks, lambda comm, on=on_kernels: work(comm, on))
        for ours, theirs in zip(got, wanted, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("on_kernels", [(True,) * 4, (False, True, True, False)], ids=str)
def test_gradients_have_the_bits_of_the_host(host: Host, on_kernels: Sequence[bool]) -> None:
    def work(comm: ThreadComm, on_kernels: Sequence[bool]) -> list[torch.Tensor | None]:
        x, idx, w = batch(comm.rank(), 7 - 2 * comm.rank(), 8, 3, HIDDEN, torch.float32)
        x.requires_grad_()
        w.requires_grad_()
        a = rank_of(
            Differentiable, comm, experts=8, topk=3, hidden=HIDDEN, max_tokens=8,
            dtype=torch.float32, ranks_per_node=2, chunk=2,
            **kernels_of(host, comm, on_kernels, 2),
        )  # fmt: skip
        found = x
        for _ in range(2):
            got = dispatch(a, found, idx, weights=w, multiple=4)
            found = found + combine(a, torch.tanh(got.x) * got.experts()[:, None])
        found.square().sum().backward()
        a.check()
        return [found.detach(), x.grad, w.grad]

    wanted = on_ranks(4, lambda comm: work(comm, (False,) * 4))
    for ours, theirs in zip(on_ranks(4, lambda c: work(c, on_kernels)), wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


SMALL = {"experts": 4, "topk": 2, "max_tokens": 8, "ranks_per_node": 2}


@pytest.mark.parametrize("on_kernels", [(True,) * 4, (False, True, True, False)], ids=str)
@on_all_ranks(4)
def test_rs_4_a_masked_rank_ends_the_calls_of_all_and_their_kernels_and_is_left_out(
    comm: ThreadComm, host: Host, on_kernels: Sequence[bool]
) -> None:
    one = rank_on(host, comm, on_kernels, parts=SOURCE, **SMALL)
    x, idx, w = batch(comm.rank(), 5, 4, 2, HIDDEN)
    if comm.rank() == 0:
        one.mask(3, "its node is gone")
    with pytest.raises(errors.PeerLost, match="rank 3"):
        layer(one, x, idx, w)
    if comm.rank() == 3:
        with pytest.raises(errors.PeerLost, match="rank 3"):
            one.dispatch_send(x, idx, source=x[:, :1].long())
    else:
        assert [lost.rank for lost in one.lost] == [3]
        kept = idx.masked_fill(idx == 3, -1)
        want = hierarchical(x, kept, w, local=1, per_node=1, nodes=4)
        for _ in range(2):
            assert torch.equal(layer(one, x, idx, w), want)
        assert one.left_out == ((3,) if (idx == 3).any() else ())


@on_all_ranks(2)
def test_rs_4_a_call_that_waits_and_its_kernels_end_when_another_thread_masks(
    comm: ThreadComm, host: Host
) -> None:
    sizes = {**SMALL, "ranks_per_node": 1}
    one = rank_on(host, comm, (True, True), **sizes)
    x, idx, w = batch(comm.rank(), 5, 4, 2, HIDDEN)
    if comm.rank() == 0:
        one.dispatch_send(x, idx, weights=w)
        said: list[BaseException] = []

        def waits() -> None:
            try:
                one.dispatch_recv()
            except BaseException as error:
                said.append(error)

        call = threading.Thread(target=waits, daemon=True)
        call.start()
        while not said:
            try:
                one.combine_recv()
            except errors.InvalidArgument as error:
                if "another thread" in str(error):
                    break
        one.mask(1, "the test said so")
        call.join(LIMIT)
        assert "the test said so" in str(said[0])


def test_rs_4_kernels_that_never_run_end_the_exchange_by_the_name_of_their_rank() -> None:
    class Nowhere:
        def launch(self, *_: object, **_options: object) -> None:
            pass

        def resident(self, *_: object) -> int:
            return 1

    def work(comm: ThreadComm) -> None:
        options: dict[str, Any] = {**SMALL, "ranks_per_node": 1, "timeout": 0.5, "parts": SOURCE}
        if comm.rank() == 1:
            options["launcher"] = Nowhere()
        one = throughput_rank(comm, **options)
        x, idx, w = batch(comm.rank(), 5, 4, 2, HIDDEN)
        with pytest.raises(errors.PeerLost, match="rank 1"):
            layer(one, x, idx, w)

    on_ranks(2, work)


def test_rs_4_workers_end_when_their_host_does_nothing_any_more(host: Host) -> None:
    """As in a rank that was stopped, whose GPU others share."""
    stream = Stream(host, 2)

    def work(comm: ThreadComm) -> None:
        options: dict[str, Any] = {**SMALL, "ranks_per_node": 1, "timeout": 1e-3}
        one = throughput_rank(comm, launcher=stream, workers=2, **options)
        assert one._steps is not None
        with one._steps._at_work():
            stream.finish(LIMIT)

    on_ranks(1, work)


def test_a_launch_that_fails_leaves_the_exchange_as_it_was(host: Host) -> None:
    class Once(Stream):
        failed = False

        def launch(self, *arguments: Any, **options: Any) -> None:
            if not self.failed:
                self.failed = True
                raise errors.ResourceError("no launch now")
            super().launch(*arguments, **options)

    def work(comm: ThreadComm) -> None:
        stream = Once(host, 1)
        sizes = {**SMALL, "ranks_per_node": 1}
        comm.stack.callback(stream.finish, LIMIT)
        one = throughput_rank(comm, launcher=stream, workers=1, parts=SOURCE, **sizes)
        x, idx, w = batch(1, 5, 4, 2, HIDDEN)
        with pytest.raises(errors.ResourceError):
            layer(one, x, idx, w)
        want = hierarchical(x, idx, w, local=4, per_node=1, nodes=1)
        assert torch.equal(layer(one, x, idx, w), want)

    on_ranks(1, work)


@on_all_ranks(1)
def test_what_does_not_fit_is_refused_before_anything_is_sent(comm: ThreadComm, host: Host) -> None:
    sizes = {**SMALL, "ranks_per_node": 1}
    one = rank_on(host, comm, (True,), **sizes)
    x, idx, w = batch(1, 5, 4, 2, HIDDEN)
    for call, word in (
        (lambda: one.dispatch_send(x[:, 1:], idx), "x"),
        (lambda: one.dispatch_send(x.float(), idx), "bfloat16"),
        (lambda: one.dispatch_send(x, idx, weights=w[:, :1]), "weights"),
        (lambda: one.dispatch_send(x, idx, scales=w), "made of"),
        (lambda: one.dispatch_send(x, idx + 4), "expert"),
        (lambda: one.dispatch_send(x.to("meta"), idx), "meta"),
        (lambda: one.dispatch_send(x, idx.to("meta")), "meta"),
        (lambda: one.dispatch_recv(), "dispatch_send"),
        (lambda: one.combine_send(x), "dispatch_send"),
        (lambda: one.combine_recv(), "dispatch_send"),
    ):
        with pytest.raises(errors.InvalidArgument, match=word):
            call()
    one.dispatch_send(x, idx, weights=w)
    with pytest.raises(errors.InvalidArgument, match="room for 1"):
        one.dispatch_recv(stride=1)
    with pytest.raises(errors.InvalidArgument, match="needed"):
        one.dispatch_recv(x=x[:1])
    got = one.dispatch_recv()
    with pytest.raises(errors.InvalidArgument, match="answers"):
        one.combine_send(got.x[:-1])
    y = got.x.clone()
    for local in range(4):
        y[got.of(local)] = expert(local, got.x[got.of(local)])
    one.combine_send(y)
    with pytest.raises(errors.InvalidArgument, match="int32"):
        one.combine_recv(dtype=torch.int32)
    want = hierarchical(x, idx, w, local=4, per_node=1, nodes=1)
    assert torch.equal(one.combine_recv(dtype=torch.float32), want)


def test_without_a_gpu_a_device_is_refused_in_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def work(comm: ThreadComm) -> None:
        with pytest.raises(errors.ResourceError, match="GPU"):
            throughput_rank(comm, device="cuda:0", **SMALL)

    on_ranks(1, work)
