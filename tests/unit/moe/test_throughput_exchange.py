"""The high-throughput exchange, against sums made by torch in the order that it promises."""

from __future__ import annotations

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe.comm import ranks_per_node
from fabric_ray.moe.deepep import Buffer
from tests.moe_ranks import ThreadComm, batch, on_all_ranks, on_ranks, unsharded
from tests.throughput_ranks import HIDDEN, SOURCE, hierarchical, layer, throughput_rank


@on_all_ranks(2)
def test_what_is_wrong_is_refused_before_anything_is_sent(comm: ThreadComm) -> None:
    sizes = {"experts": 4, "topk": 2, "max_tokens": 8, "ranks_per_node": 1}
    for wrong, word in (
        ({"ranks_per_node": 3}, "ranks_per_node"),
        ({"ring_chunks": 1}, "ring_chunks"),
        ({"channels": 5}, "channels"),
        ({"chunk": 0}, "chunk"),
        ({"answer_dtype": torch.int8}, "summed"),
        ({"timeout": 0.0}, "timeout"),
    ):
        with pytest.raises(errors.InvalidArgument, match=word):
            throughput_rank(comm, **{**sizes, **wrong})
    one = throughput_rank(comm, **sizes)
    x, idx, w = batch(1, 5, 4, 2, HIDDEN)
    for call, word in (
        (lambda: one.dispatch_send(x[:, 1:], idx), "x"),
        (lambda: one.dispatch_send(x, idx, weights=w[:, :1]), "weights"),
        (lambda: one.dispatch_send(x, idx, scales=w), "made of"),
        (lambda: one.dispatch_recv(), "dispatch_send"),
        (lambda: one.combine_send(x), "dispatch_send"),
        (lambda: one.combine_recv(), "dispatch_send"),
    ):
        with pytest.raises(errors.InvalidArgument, match=word):
            call()


@pytest.mark.parametrize("per_node", [1, 2])
def test_an_expert_that_a_token_names_twice_gets_one_row_for_both_weights(per_node: int) -> None:
    def work(comm: ThreadComm) -> None:
        one = throughput_rank(
            comm, ranks_per_node=per_node, experts=8, topk=3, max_tokens=16, parts=SOURCE
        )
        for turn in range(2):
            x, idx, w = batch(turn * 4 + comm.rank(), 10, 8, 3, HIDDEN)
            idx[::2, 2] = idx[::2, 0]
            idx[1] = idx[1, 0]
            sums = layer(one, x, idx, w)
            nodes = comm.size() // per_node
            assert torch.equal(
                sums, hierarchical(x, idx, w, local=2, per_node=per_node, nodes=nodes)
            )
        here = torch.full((4, 3), 2 * comm.rank())
        one.dispatch_send(x[:4], here, source=torch.zeros(4, 1, dtype=torch.int64))
        assert one.dispatch_recv().counts.tolist() == [4, 0]

    on_ranks(4, work)


def test_deepeps_normal_calls_send_a_token_once_to_each_node() -> None:
    experts, topk, ranks, per_node = 8, 4, 4, 2

    def work(comm: ThreadComm) -> None:
        buffer = Buffer(comm=comm, ranks_per_node=per_node, timeout=60.0)
        for turn in range(3):
            x, idx, w = batch(turn * 7 + comm.rank(), 20 + comm.rank(), experts, topk, HIDDEN)
            per_rank, of_nodes, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
            assert of_nodes is not None
            in_node = in_rank.view(-1, ranks // per_node, per_node).any(2)
            assert torch.equal(of_nodes.long(), in_node.sum(0))
            got, got_idx, got_w, _, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=w,
            )
            assert isinstance(got, torch.Tensor)
            assert got_idx is not None
            assert got_w is not None
            assert handle is not None
            first = comm.rank() * experts // ranks
            y = unsharded(got, got_idx, got_w, first=first)
            sums, _, _ = buffer.combine(y, handle)
            local = experts // ranks
            want = hierarchical(x, idx, w, local=local, per_node=per_node, nodes=ranks // per_node)
            assert torch.equal(sums, want.to(torch.bfloat16))
        assert "rings out" in buffer.explain()
        buffer.destroy()

    on_ranks(ranks, work)


def test_ranks_of_one_host_are_one_node() -> None:
    assert on_ranks(3, ranks_per_node) == [3, 3, 3]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", 2), ("abc", 1), ("aab", 3), ("abab", 4), ("aaaa", 4), ("aabbaa", 6)],
)
def test_nodes_are_neighbours_of_equally_many_hosts(hosts: str, expected: int) -> None:
    class Hosts:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return len(hosts)

        def all_gather(self, value: bytes, /) -> list[bytes]:
            return [host.encode() for host in hosts]

    assert ranks_per_node(Hosts()) == expected
