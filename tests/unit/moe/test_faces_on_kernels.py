"""Layers, gradients and familiar faces where kernels make the exchange: the bits of the host.

The kernels run on the processor. Where a GPU would be asked to wait, a capture refuses
(:mod:`tests.host_graph`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fabric_ray import errors
from fabric_ray.moe import AllToAll, cast, pplx
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from fabric_ray.moe.deepep import Buffer
from tests.examples import by_turns
from tests.host_graph import Graph
from tests.host_kernels import Host
from tests.moe_ranks import (
    ThreadComm,
    batch,
    expert,
    on_all_ranks,
    on_ranks,
    rank_of,
)

EXPERTS, TOPK, M, HIDDEN = 6, 2, 5, 512
KERNELS = [(True, True), (True, False, True)]
"""Which ranks have them."""


@pytest.mark.parametrize("on_kernels", [False, True])
@on_all_ranks(2)
def test_rs_4_gradients_that_lack_a_part_are_told_of_before_they_are_used(
    comm: ThreadComm, host: Host, on_kernels: bool
) -> None:
    a = rank_of(
        Differentiable, comm, experts=2, topk=1, hidden=8, max_tokens=M, dtype=torch.float32,
        launcher=host.another() if on_kernels else None,
    )  # fmt: skip
    x, idx, w = batch(comm.rank(), M, 2, 1, 8, torch.float32)
    combine(a, dispatch(a, x, idx).x, w)
    a.check()
    comm.all_gather(b"")
    # As a device's host learns of it while nothing is called.
    a.weights.mask(1 - comm.rank(), "it fell silent")
    with pytest.raises(errors.PeerLost, match=r"rank . was lost .* it fell silent"):
        a.check()


@on_all_ranks(1)
def test_pplx_room_is_for_all_that_can_come(comm: ThreadComm, host: Host) -> None:
    a = pplx.AllToAll.internode(
        M, EXPERTS, TOPK, 0, 1, 1, HIDDEN, 2 * HIDDEN, 0, comm=comm, launcher=host.another()
    )
    x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
    counts = torch.empty(EXPERTS, dtype=torch.int32)
    few = torch.empty(EXPERTS, M - 1, HIDDEN, dtype=torch.bfloat16)
    a.dispatch(counts, few, None, x, None, idx, do_recv=False)
    with pytest.raises(errors.InvalidArgument, match="stride is 4, and an expert may get 5"):
        a.dispatch(counts, few, None, x, None, idx, do_send=False)
    with pytest.raises(errors.InvalidArgument, match="out_expert_x is on meta"):
        a.dispatch(counts, few.to("meta"), None, x, None, idx)
    a.destroy()


FORMS: list[dict[str, Any]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
    {"use_fp8": False, "use_nvfp4": True, "x_global_scale": torch.tensor(448 * 6 / 5.0)},
]


def by_expert(recv: Any) -> tuple[Tensor, ...]:
    """Tokens and scales ``[experts, rows, ...]``; four bits come with experts last."""
    if not isinstance(recv, tuple) or recv[0].dtype != torch.uint8:
        return recv if isinstance(recv, tuple) else (recv,)
    x, tiles = recv[0].permute(2, 0, 1), recv[1].permute(5, 2, 1, 0, 4, 3)
    return x, tiles.reshape(len(x), -1, HIDDEN // 16)[:, : x.shape[1]]


def answers(rank: int, recv: Any) -> Tensor:
    x, *scales = by_expert(recv)
    if x.dtype == torch.uint8:
        # Any function of all bits will do.
        x = (x.float() * scales[0].float().repeat_interleave(8, 2)).repeat_interleave(2, 2)
        x = x.to(torch.bfloat16)
    elif scales:
        x = cast.back(x, *scales)
    return torch.stack([expert(len(x) * rank + i, part) for i, part in enumerate(x)])


def low_latency(
    kernels: tuple[bool, ...], host: Host, form: dict[str, Any], hooks: bool
) -> list[list[Tensor]]:
    """All that DeepEP's calls return, of two batches that overlap, twice."""

    def work(comm: ThreadComm) -> list[Tensor]:
        launcher = host.another() if kernels[comm.rank()] else None
        buffer = Buffer(low_latency_mode=True, comm=comm, launcher=launcher)
        local, found = EXPERTS // comm.size(), []
        stats = torch.zeros(local, dtype=torch.int32)
        options = {"return_recv_hook": hooks}
        for turn in range(2):
            sent = []
            for one in range(2):
                x, idx, w = batch(10 * turn + 5 * one + comm.rank(), M, EXPERTS, TOPK, HIDDEN)
                got = buffer.low_latency_dispatch(x, idx, M, EXPERTS, stats, **form, **options)
                sent.append((idx, w, *got))
            for idx, w, recv, counts, handle, event, hook in sent:
                if hook is not None:
                    hook()
                event.current_stream_wait()
                y = answers(comm.rank(), recv)
                less = idx.clone()
                less[0, 0] = -1
                apart = w.repeat_interleave(2, 1)[:, ::2]
                out = buffer.low_latency_combine(y, less, apart, handle, **options)
                if out[2] is not None:
                    out[2]()
                found += [out[0], counts, handle[1]]
                tensors = by_expert(recv)
                for expert_of, n in enumerate(counts.tolist()):
                    found += [
                        t[expert_of, :n]
                        .clone(memory_format=torch.contiguous_format)
                        .view(torch.uint8)
                        for t in tensors
                    ]
                    found.append(handle[0][expert_of, :n])
        buffer.check()
        buffer.destroy()
        return [*found, stats]

    return on_ranks(len(kernels), work)


@pytest.mark.parametrize(("kernels", "form", "hooks"), by_turns(KERNELS, FORMS, [False, True]))
def test_deepep_calls_return_what_they_do_on_the_host(
    host: Host, kernels: tuple[bool, ...], form: dict[str, Any], hooks: bool
) -> None:
    wanted = low_latency((False,) * len(kernels), host, form, hooks)
    for ours, theirs in zip(low_latency(kernels, host, form, hooks), wanted, strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def launched(buffer: Buffer, graph: Graph, form: dict[str, Any], given: Any) -> list[int]:
    """Launches and operations of torch after each half of a dispatch and a combine."""
    x, idx, w, y = given
    options: dict[str, Any] = {"return_recv_hook": True}
    _, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, M, EXPERTS, **form, **options)
    sizes = [graph.size]
    hook()
    sizes.append(graph.size)
    combined, _, hook = buffer.low_latency_combine(y, idx, w, handle, **options)
    sizes.append(graph.size)
    hook()
    assert combined.shape == (M, HIDDEN)
    return [*sizes, graph.size]


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@on_all_ranks(1)
def test_a_low_latency_call_is_two_launches_and_no_operation_of_torch(
    comm: ThreadComm, host: Host, form: dict[str, Any]
) -> None:
    graph = Graph()
    launcher = graph.launcher(host.another())
    buffer = Buffer(low_latency_mode=True, comm=comm, launcher=launcher)
    given = (
        *batch(0, M, EXPERTS, TOPK, HIDDEN),
        torch.zeros(EXPERTS, M, HIDDEN, dtype=torch.bfloat16),
    )
    launched(buffer, Graph(), form, given)  # makes the exchanges
    with graph.capture():
        assert launched(buffer, graph, form, given) == [1, 2, 3, 4]
    graph.replay()
    buffer.check()
    buffer.destroy()


@on_all_ranks(1)
def test_tensors_of_a_normal_call_lie_together(comm: ThreadComm) -> None:
    buffer = Buffer(comm=comm)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    idx = torch.zeros(2, 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    layout = (None, per_rank, None, in_rank, per_expert)
    for there in ((x.to("meta"), *layout, idx), (x, *layout, idx.to("meta"))):
        with pytest.raises(errors.InvalidArgument, match=r"lies on .*; move it to"):
            buffer.dispatch(*there)
    recv, _, _, _, handle, _ = buffer.dispatch(x, *layout, idx)
    for calls in (
        lambda: buffer.dispatch(x.to("meta"), handle=handle),
        lambda: buffer.combine(recv.to("meta"), handle),
        lambda: buffer.combine(recv, handle, bias=x.to("meta")),
    ):
        with pytest.raises(errors.InvalidArgument, match=r"lies on .*; move it to"):
            calls()
    buffer.destroy()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in a first half is known before the second one."""
    for name in ("dispatch_recv", "dispatch_recv_into"):
        receive = getattr(AllToAll, name)

        def later(self: AllToAll, *given: Any, receive: Any = receive, **options: Any) -> Any:
            self._finish()
            return receive(self, *given, **options)

        monkeypatch.setattr(AllToAll, name, later)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.usefixtures("known")
@on_all_ranks(1)
def test_deepep_tokens_that_go_nowhere_are_told_of_when_the_others_have_come(
    comm: ThreadComm, host: Host, hooks: bool
) -> None:
    buffer = Buffer(low_latency_mode=True, comm=comm, launcher=host.another())
    x, idx, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
    bad = idx.clone()
    bad[0, 0] = 99
    options: dict[str, Any] = {"return_recv_hook": hooks}
    for turn in range(2):
        recv, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, bad, M, EXPERTS, use_fp8=False, **options
        )
        if hook is not None:
            hook()
        assert counts.tolist() == [int((bad == e).sum()) for e in range(EXPERTS)]
        out, _, hook = buffer.low_latency_combine(answers(0, recv), bad, w, handle, **options)
        if hook is not None:
            hook()
        assert out[1:].any(), turn
        if not turn:
            with pytest.raises(errors.InvalidArgument, match="is no expert"):
                buffer.check()
    # The two exchanges that dispatches alternate between: one was told of, and one wasn't.
    for turn in range(2):
        if turn:
            with pytest.raises(errors.InvalidArgument, match="nothing of this dispatch_send"):
                buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(answers(0, recv), idx, w, handle)
    buffer.check()
    buffer.destroy()


@pytest.mark.usefixtures("known")
@on_all_ranks(1)
def test_pplx_tokens_that_go_nowhere_are_told_of_by_the_next_dispatch(
    comm: ThreadComm, host: Host
) -> None:
    a = pplx.AllToAll.internode(
        M, EXPERTS, TOPK, 0, 1, 1, HIDDEN, 2 * HIDDEN, 0, comm=comm, launcher=host.another()
    )
    x, idx, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
    counts = torch.empty(EXPERTS, dtype=torch.int32)
    room = torch.empty(EXPERTS, M, HIDDEN, dtype=torch.bfloat16)
    out = torch.empty(M, HIDDEN, dtype=torch.bfloat16)
    bad = idx.clone()
    bad[0, 0] = 99
    a.dispatch(counts, room, None, x, None, bad)
    a.combine(out, bad, w, answers(0, room))
    with pytest.raises(errors.InvalidArgument, match="nothing of this dispatch_send was done"):
        a.dispatch(counts, room, None, x, None, idx)
    a.dispatch(counts, room, None, x, None, idx)
    assert counts.tolist() == [int((idx == e).sum()) for e in range(EXPERTS)]
    a.combine(out, idx, w, answers(0, room))
    a.destroy()


@pytest.mark.parametrize("alone", [True, False])
def test_what_went_wrong_on_a_device_is_raised_when_all_is_freed(host: Host, alone: bool) -> None:
    ranks = 1 if alone else 2

    def work(comm: ThreadComm) -> None:
        buffer = Buffer(low_latency_mode=True, comm=comm, launcher=host.another())
        x, idx, w = batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)
        if comm.rank() == 0:
            idx[0, 0] = 99
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(answers(comm.rank(), recv), idx, w, handle)
        if comm.rank() == 0:
            with pytest.raises(errors.InvalidArgument, match="is no expert"):
                buffer.destroy()
        else:
            buffer.destroy()
        buffer.destroy()
        with pytest.raises(errors.InvalidArgument, match="this was destroyed"):
            buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)

    on_ranks(ranks, work)


@on_all_ranks(1)
def test_tensors_that_lie_apart_are_refused(comm: ThreadComm, host: Host) -> None:
    buffer = Buffer(low_latency_mode=True, comm=comm, launcher=host.another())
    x, idx, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
    invalid = errors.InvalidArgument
    with pytest.raises(invalid, match="indices lie on meta, tokens on cpu"):
        buffer.low_latency_dispatch(x, idx.to("meta"), M, EXPERTS)
    stats = torch.zeros(EXPERTS, dtype=torch.int32, device="meta")
    with pytest.raises(invalid, match=r"statistics are .* on meta"):
        buffer.low_latency_dispatch(x, idx, M, EXPERTS, stats)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS)
    with pytest.raises(invalid, match="lies on meta; move it to cpu"):
        buffer.low_latency_combine(answers(0, recv), idx, w.to("meta"), handle)
    buffer.low_latency_combine(answers(0, recv), idx, w, handle)
    buffer.destroy()


@pytest.mark.parametrize("on_kernels", [False, True])
@on_all_ranks(1)
def test_answers_that_are_not_wanted_are_skipped_and_not_multiplied_by_zero(
    comm: ThreadComm, host: Host, on_kernels: bool
) -> None:
    launcher = host.another() if on_kernels else None
    a = rank_of(AllToAll, comm, experts=3, topk=2, hidden=8, max_tokens=M, launcher=launcher)
    x, w = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 2)
    idx = torch.tensor([[0, 1], [2, -1]])
    for wanted, sums in (
        ([[True, True], [True, True]], [float("nan"), 1]),
        ([[False, True], [True, False]], [1, 1]),
        ([[False, True], [False, True]], [1, 0]),
    ):
        a.dispatch_send(x, idx)
        got = a.dispatch_recv()
        # Expert 0 answers no number.
        nothing = (got.experts() == 0)[:, None]
        a.combine_send(torch.where(nothing, float("nan"), got.x.float()).to(torch.bfloat16))
        with pytest.raises(errors.InvalidArgument, match=r"wanted is torch\.bool"):
            a.combine_recv(w, wanted=torch.ones(2, 3, dtype=torch.bool))
        apart = torch.tensor(wanted).repeat_interleave(2, 1)[:, ::2]
        found = a.combine_recv(w, wanted=apart)[:, 0].float()
        assert torch.equal(found.nan_to_num(9), torch.tensor(sums).float().nan_to_num(9))
    a.check()
