"""Both modes of an exchange over any routing, format, division and buffer, against plain torch.

``FABRIC_MOE_EXAMPLES`` says how many examples of each there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric_ray.moe import AllToAll, RowPart, ThroughputAllToAll, cast
from fabric_ray.moe.tokens import Dispatched
from tests.examples import examples
from tests.moe_ranks import ThreadComm, expert, on_ranks, rank_of

HIDDEN, BLOCK, MOST, TURNS = 128, 16, 24, 2
EXAMPLES = int(os.environ.get("FABRIC_MOE_EXAMPLES", examples(40)))

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Tokens in bfloat16, their experts, and weights."""


@dataclass(frozen=True)
class Format:
    """How tokens go."""

    dtype: torch.dtype
    parts: tuple[RowPart, ...]
    cast: Callable[[Tensor], tuple[Tensor, ...]]

    def there(self, x: Tensor) -> Tensor:
        """What an expert sees of tokens."""
        sent = self.cast(x)
        return cast.back(*sent) if len(sent) == 2 else sent[0]


def scales(width: int, dtype: torch.dtype) -> tuple[RowPart, ...]:
    return (RowPart("scales", width, dtype),)


BLOCKS = HIDDEN // BLOCK
FORMATS = {
    "bf16": Format(torch.bfloat16, (), lambda x: (x,)),
    "fp8": Format(
        torch.float8_e4m3fn, scales(BLOCKS, torch.float32), lambda x: cast.to_fp8(x, block=BLOCK)
    ),
    "fp8, ue8m0": Format(
        torch.float8_e4m3fn,
        scales(BLOCKS, torch.float8_e8m0fnu),
        lambda x: cast.to_fp8(x, block=BLOCK, scales=torch.float8_e8m0fnu),
    ),
    "fp8, packed": Format(
        torch.float8_e4m3fn,
        scales(BLOCKS // 4, torch.int32),
        lambda x: cast.to_fp8(x, block=BLOCK, scales=torch.int32),
    ),
    "int8": Format(
        torch.int8, scales(BLOCKS, torch.float32), lambda x: cast.to_int8(x, block=BLOCK)
    ),
}


def routes(kind: str, tokens: int, experts: int, topk: int, g: torch.Generator) -> Tensor:
    """The experts of each token, of which none is named twice."""
    odds = torch.ones(experts)
    if kind == "zipf":
        odds = 1.0 / torch.arange(1, experts + 1) ** 1.2
    if tokens == 0:
        return torch.empty(0, topk, dtype=torch.int64)
    idx = torch.multinomial(odds.expand(tokens, -1), topk, generator=g)
    if kind == "hot":
        # All tokens choose the last expert first.
        idx = torch.where(idx == experts - 1, idx[:, :1], idx)
        idx[:, 0] = experts - 1
    if kind == "holes":
        idx[torch.rand(idx.shape, generator=g) < 0.4] = -1
    if kind == "none":
        idx[:] = -1
    return idx.contiguous()


@dataclass(frozen=True)
class Case:
    """What ranks exchange in each turn."""

    local: int
    topk: int
    format: Format
    turns: list[list[Batch]]
    """By turn and rank."""

    @property
    def ranks(self) -> int:
        return len(self.turns[0])

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "experts": self.ranks * self.local,
            "topk": self.topk,
            "hidden": HIDDEN,
            "max_tokens": MOST,
            "dtype": self.format.dtype,
            "parts": self.format.parts,
            "timeout": 60.0,
        }


@st.composite
def cases(draw: Any, ranks: st.SearchStrategy[int]) -> Case:
    count, local = draw(ranks), draw(st.integers(1, 3))
    topk = draw(st.integers(1, min(4, count * local)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))

    def batch() -> Batch:
        kind = draw(st.sampled_from(["uniform", "zipf", "hot", "holes", "none"]))
        tokens = draw(st.sampled_from([0, 1, 2, 7, MOST]))
        x = torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16)
        return (
            x,
            routes(kind, tokens, count * local, topk, g),
            torch.rand(tokens, topk, generator=g),
        )

    turns = [[batch() for _ in range(count)] for _ in range(TURNS)]
    return Case(local, topk, FORMATS[draw(st.sampled_from([*FORMATS]))], turns)


def answers(case: Case, of: Batch) -> Tensor:
    """Of each token's experts, zeros for none: bfloat16 ``[tokens, topk, hidden]``."""
    x, idx, _ = of
    there = case.format.there(x)
    found = torch.zeros(*idx.shape, HIDDEN, dtype=torch.bfloat16)
    for number in {*idx.flatten().tolist()} - {-1}:
        token, place = (idx == number).nonzero(as_tuple=True)
        found[token, place] = expert(number, there[token])
    return found


def summed(case: Case, of: Batch, chosen: Tensor) -> Tensor:
    """The weighted sum over those of a token's experts, one after the other, in float32."""
    total = torch.zeros(len(chosen), HIDDEN)
    for k, answer in enumerate(answers(case, of).float().unbind(1)):
        total += torch.where(chosen[:, k, None], of[2][:, k, None] * answer, 0.0)
    return total


def sums_by_nodes(case: Case, of: Batch, per_node: int) -> Tensor:
    """Over a rank's experts, a node's ranks, and nodes, the first two rounded."""
    total = torch.zeros(len(of[0]), HIDDEN)
    for first in range(0, case.ranks, per_node):
        of_node = torch.zeros_like(total)
        for rank in range(first, first + per_node):
            here = (of[1] >= 0) & (of[1] // case.local == rank)
            of_node += summed(case, of, here).to(torch.bfloat16).float()
        total += of_node.to(torch.bfloat16).float()
    return total


def check_rows(case: Case, rank: int, turn: int, got: Dispatched, multiple: int) -> Tensor:
    """That each local expert has its tokens' bytes in the order of ranks and tokens, with what goes
    with them; returns the answers."""
    y = torch.full(got.x.shape, float("nan"), dtype=torch.bfloat16)
    for here in range(case.local):
        number, of = rank * case.local + here, got.of(here)
        chosen = [x[(idx == number).any(1)] for x, idx, _ in case.turns[turn]]
        sent = case.format.cast(torch.cat(chosen))
        came = [got.x[of], *(part[of] for part in got.parts.values())]
        assert of.start % multiple == 0
        for one, other in zip(came, sent, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
        y[of] = expert(number, cast.back(*came) if len(came) == 2 else came[0])
    return y


def given_parts(case: Case, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    sent, *others = case.format.cast(x)
    return sent, dict(zip((p.name for p in case.format.parts), others, strict=True))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    case=cases(st.integers(1, 4)),
    private_rows=st.sampled_from([0, 1, 5, 32]),
    shared_rows=st.sampled_from([None, 1, 3, 16]),
    multiple=st.sampled_from([1, 8]),
)
def test_low_latency_sums_have_the_bits_of_one_place(
    case: Case, private_rows: int, shared_rows: int | None, multiple: int
) -> None:
    def work(comm: ThreadComm) -> None:
        room = {"private_rows": private_rows, "shared_rows": shared_rows}
        a = rank_of(AllToAll, comm, **room, **case.sizes)
        for turn, batches in enumerate(case.turns):
            x, idx, w = batches[comm.rank()]
            sent, parts = given_parts(case, x)
            a.dispatch_send(sent, idx, **parts)
            got = a.dispatch_recv(multiple=multiple)
            a.combine_send(check_rows(case, comm.rank(), turn, got, multiple))
            want = summed(case, (x, idx, w), idx >= 0)
            assert torch.equal(a.combine_recv(w, dtype=torch.float32), want)
        assert a.lost == ()

    on_ranks(case.ranks, work)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    case_and_node=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 1), (4, 4)]).flatmap(
        lambda place: st.tuples(cases(st.just(place[0])), st.just(place[1]))
    ),
    channels=st.integers(1, 3),
    chunk=st.sampled_from([1, 3, 32]),
    ring_chunks=st.integers(2, 4),
    multiple=st.sampled_from([1, 8]),
)
def test_high_throughput_sums_have_the_bits_of_their_order(
    case_and_node: tuple[Case, int], channels: int, chunk: int, ring_chunks: int, multiple: int
) -> None:
    case, per_node = case_and_node

    def work(comm: ThreadComm) -> None:
        rings = {"channels": channels, "chunk": chunk, "ring_chunks": ring_chunks}
        a = rank_of(ThroughputAllToAll, comm, ranks_per_node=per_node, **rings, **case.sizes)
        across = 0
        for turn, batches in enumerate(case.turns):
            x, idx, w = of = batches[comm.rank()]
            sent, parts = given_parts(case, x)
            a.dispatch_send(sent, idx, weights=w, **parts)
            got = a.dispatch_recv(multiple=multiple)
            a.combine_send(check_rows(case, comm.rank(), turn, got, multiple))
            want = sums_by_nodes(case, of, per_node)
            assert torch.equal(a.combine_recv(dtype=torch.float32), want)
            nodes = torch.where(idx >= 0, idx // (case.local * per_node), -1)
            mine = comm.rank() // per_node
            across += sum(len({*row} - {-1, mine}) for row in nodes.tolist())
        # A token goes once to each other node that has experts of it.
        assert a.traffic.rail_tokens == across
        assert a.lost == ()

    on_ranks(case.ranks, work)
