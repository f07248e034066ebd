"""torchtitan's modules over DeepEP, imported as they are: their operators, which it registers for
GPUs, are registered for CPUs too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.adapters.moe_rank import EXPERTS, TOPK, M, Rank
from tests.moe_ranks import batch

HIDDEN, TOKENS = 256, 6


def routed(me: Rank, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many tokens on every rank, each of other experts."""
    x, _, w = batch(turn * 8 + me.rank, TOKENS, EXPERTS, TOPK, HIDDEN)
    g = torch.Generator().manual_seed(turn * 8 + me.rank)
    idx = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :TOPK]
    return x.requires_grad_(), idx, w.requires_grad_()


def answers(me: Rank, rows: Tensor, counts: Tensor) -> Tensor:
    """Each expert answers with its rows times its number from 1; rows behind them stay."""
    scale = torch.ones(len(rows), 1)
    number = torch.arange(me.first, me.first + me.local) + 1
    of_rows = number.repeat_interleave(counts.to(torch.int64))[:, None]
    scale[: len(of_rows)] = of_rows.float()
    return (rows * scale).to(rows.dtype)


def check(x: Tensor, idx: Tensor, w: Tensor, sums: Tensor) -> None:
    factor = (w.detach() * (idx + 1)).sum(1, keepdim=True)
    near: dict[str, Any] = {"rtol": 0.03, "atol": 0.1}
    torch.testing.assert_close(sums.float(), x.float() * factor, **near)
    if not sums.requires_grad:
        return
    sums.float().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(x.grad.float(), factor.expand_as(x), **near)
    ways = x.detach().float().sum(1, keepdim=True) * (idx + 1)
    torch.testing.assert_close(w.grad, ways, rtol=0.05, atol=2.0)


def torchtitan_hybrid(me: Rank) -> None:
    from torchtitan.distributed.deepep import hybridep

    for name in ("dispatch", "combine", "dispatch_bwd", "combine_bwd"):
        operator: Any = getattr(hybridep, f"_{name}_impl")
        operator.register_kernel("cpu", operator._init_fn)
    buffer: Any = None
    for turn, (pad, capacity) in enumerate([(None, None), (16, None), (2, 1.0)]):
        hybridep.get_buffer(me.group, HIDDEN, M, me.local)
        assert buffer in (None, hybridep._buffer)  # one buffer serves all layers
        buffer = hybridep._buffer
        x, idx, w = routed(me, turn)
        rows, counts, state = hybridep.dispatch_tokens(
            x, idx, w, me.local, EXPERTS, me.group,
            non_blocking_expert_capacity_factor=capacity, pad_multiple=pad,
        )  # fmt: skip
        sums = hybridep.combine_tokens(answers(me, rows, counts), state, pad_multiple=pad)
        check(x, idx, w, sums)
    buffer.destroy()
    hybridep.get_buffer(me.group, 2 * HIDDEN, 2 * M, me.local)
    larger: Any = hybridep._buffer
    assert larger is not buffer
    larger.destroy()


def torchtitan_elastic(me: Rank) -> None:
    from torchtitan.distributed.deepep import deepep

    for name in ("dispatch", "combine"):
        torch.library.impl(deepep._lib, name, "CPU")(getattr(deepep, f"_{name}_op_impl"))
    buffer: Any = None
    for turn, graph in enumerate([False, True, False]):
        sizes: dict[str, int] = {"hidden": HIDDEN, "num_max_tokens_per_rank": M, "num_topk": TOPK}
        found = deepep.get_buffer(me.group, **sizes)
        assert buffer in (None, found)
        buffer = found
        x, idx, w = routed(me, turn)
        with torch.set_grad_enabled(not graph):
            rows, counts, state = deepep.dispatch_tokens(
                x, idx, w, me.local, EXPERTS, num_tokens_per_rank=TOKENS, cudagraphable=graph
            )
            assert state.cudagraphable == graph
            sums = deepep.combine_tokens(answers(me, rows, counts), state)
            deepep.sync_combine()
        check(x, idx, w, sums)
    buffer.destroy()
