"""pplx-garden's ``P2PAllToAll`` as its own test calls it, on ranks that share tokens too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe.pplx_garden import P2PAllToAll
from tests.moe_ranks import ThreadComm, on_all_ranks, on_ranks

EXPERTS, TOPK, M, HIDDEN = 16, 2, 9, 128


class Parallel:
    """A ``ParallelGroup``: ranks that are neighbours."""

    def __init__(self, comm: ThreadComm, size: int) -> None:
        self.rank, self.size = comm.rank() % size, size
        self.all_gather_object = comm.all_gather


def made(comm: ThreadComm, *, dp: int = 1, **options: Any) -> P2PAllToAll:
    sizes: dict[str, Any] = {
        "max_num_tokens": M, "num_experts": EXPERTS, "expert_padding": 1, "hidden_dim": HIDDEN,
        "hidden_dim_scale": None, "in_dtype": torch.bfloat16, "out_dtype": torch.bfloat16,
        "scale_dtype": None, "num_experts_per_token": TOPK, "nets_per_gpu": 2,
        "max_private_tokens": None, "device": torch.device("cpu"), "node_group": None,
    }  # fmt: skip
    return P2PAllToAll(
        **(sizes | options),
        dp_group=Parallel(comm, dp) if dp > 1 else None,
        global_group=Parallel(comm, comm.size()),
    )


def data(seed: int, in_dtype: torch.dtype, scales: int | None) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, HIDDEN, generator=g).to(in_dtype)
    idx = torch.rand(M, EXPERTS, generator=g).argsort(1)[:, :TOPK].to(torch.uint32)
    w = torch.rand(M, TOPK, generator=g)
    return x, torch.randn(M, scales or 1, generator=g), idx, w / w.sum(1, keepdim=True)


def act(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x * 2
    return x.float() * scale.repeat(1, x.shape[1] // scale.shape[1]) * 2


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize(
    ("dtype", "scales", "padding"),
    [(torch.float32, None, 1), (torch.bfloat16, None, 16), (torch.bfloat16, 16, 4)],
)
def test_a_layer_is_that_of_its_own_test(
    ranks: int, dp: int, dtype: torch.dtype, scales: int | None, padding: int
) -> None:
    def work(comm: ThreadComm) -> None:
        groups, local = ranks // dp, EXPERTS // ranks
        a = made(
            comm, dp=dp, in_dtype=dtype, out_dtype=dtype, hidden_dim_scale=scales,
            scale_dtype=torch.float32 if scales else None, expert_padding=padding,
            max_private_tokens=2,
        )  # fmt: skip
        room = M * local * groups + local * padding
        for turn, split in enumerate([False, True]):
            every = [data(turn * 8 + group, dtype, scales) for group in range(groups)]
            x, scale, idx, w = every[comm.rank() // dp]
            counts = torch.empty(local, dtype=torch.int32)
            out_x = torch.zeros(room, HIDDEN, dtype=dtype)
            # By columns, as a grouped GEMM reads them.
            out_scale = torch.full((scales, room), 7.0).T if scales else None
            halves = [(True, False), (False, True)] if split else [(True, True)]
            sent = scale if scales else None
            for send, receive in halves:
                a.dispatch(counts, out_x, out_scale, x, sent, idx, w, do_send=send, do_recv=receive)
            named = torch.cat([one[2].flatten() for one in every]).long()
            first = comm.rank() * local
            each = torch.bincount(named, minlength=EXPERTS)[first : first + local]
            assert torch.equal(counts.long(), each)
            begin = 0
            for number, count in enumerate(counts.tolist()):
                came = {tuple(row.tolist()) for row in out_x[begin : begin + count]}
                there = [(one[2].long() == first + number).any(1) for one in every]
                wanted = torch.cat([one[0][of] for one, of in zip(every, there, strict=True)])
                assert came == {tuple(row.tolist()) for row in wanted}
                end = begin + count
                begin = -(-end // padding) * padding
                if out_scale is not None:
                    assert (out_scale[end:begin] == 7).all()
            y = act(out_x, out_scale).to(dtype)
            out = torch.full((M, HIDDEN), 3.0).to(dtype)
            for send, receive in halves:
                a.combine(out, idx, w, y, do_send=send, do_recv=receive)
            torch.testing.assert_close(out, act(x, sent).to(dtype))
        a.destroy()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_sums_may_be_added_and_tokens_bounded(comm: ThreadComm) -> None:
    a = made(comm)
    x, _, idx, w = data(comm.rank(), torch.bfloat16, None)
    counts = torch.empty(EXPERTS // 2, dtype=torch.int32)
    out_x = torch.zeros(M * EXPERTS, HIDDEN, dtype=torch.bfloat16)
    bound = torch.tensor([4], dtype=torch.int32)
    a.dispatch(counts, out_x, None, x, None, idx, w, bound)
    assert sum(comm.all_gather(bytes([int(counts.sum())]))[r][0] for r in (0, 1)) == 2 * 4 * TOPK
    out = torch.full((M, HIDDEN), 3.0, dtype=torch.bfloat16)
    for other in (2, 6):
        with pytest.raises(errors.InvalidArgument, match="tokens are combined, and 4 were"):
            a.combine(out, idx, w, out_x, torch.tensor([other]), accumulate=True)
    a.combine(out, idx, w, out_x, bound, accumulate=True)
    torch.testing.assert_close(out[:4], x[:4] + 3)
    assert (out[4:] == 3).all()
    invalid = errors.InvalidArgument
    with pytest.raises(invalid, match="bound_m is 10"):
        a.dispatch(counts, out_x, None, x, None, idx, w, torch.tensor([10]))
    with pytest.raises(invalid, match="out_expert_x_scale has"):
        a.dispatch(counts, out_x, w, x, None, idx, w)
    with pytest.raises(invalid, match="out_expert_num_tokens is"):
        a.dispatch(counts[:2], out_x, None, x, None, idx, w)
    with pytest.raises(invalid, match="give both"):
        made(comm, hidden_dim_scale=4)
    a.destroy()


@on_all_ranks(2)
def test_ranks_that_share_tokens_add_sums_themselves(comm: ThreadComm) -> None:
    a = made(comm, dp=2)
    x, _, idx, w = data(0, torch.bfloat16, None)
    with pytest.raises(errors.InvalidArgument, match="add the sums"):
        a.combine(x, idx, w, x, accumulate=True)
    a.destroy()
