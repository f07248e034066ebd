"""What the kernels of expert parallelism promise, checked on whatever device a launcher has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from fabric_ray.kernels import Chunk, MoeKernels, MoeSizes, Placement, Routing, Steps
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.steps import MEETING_WORDS
from fabric_ray.moe import cast

NONE = -1


@dataclass(frozen=True)
class Case:
    """Tokens of one rank and their experts."""

    name: str
    sizes: MoeSizes
    tokens: int
    hot: bool = False
    holes: float = 0.0

    def indices(self) -> torch.Tensor:
        """``[max_tokens, topk]``, of which ``tokens`` count."""
        s = self.sizes
        dice = torch.Generator().manual_seed(len(self.name) + self.tokens)
        scores = torch.rand(s.max_tokens, s.experts, generator=dice)
        if self.hot:
            scores[:, 0] = 2.0
        indices = scores.topk(s.topk, dim=1).indices
        gone = torch.rand(indices.shape, generator=dice) < self.holes
        indices[gone] = NONE
        # What lies behind the last token is never looked at.
        indices[self.tokens :] = 1 << 40
        return indices.contiguous()


SMALL = MoeSizes(ranks=4, experts=16, topk=3, max_tokens=100)
CASES = [
    Case("no token", SMALL, 0),
    Case("one token", SMALL, 1),
    Case("some tokens", SMALL, 37, holes=0.3),
    Case("all tokens", SMALL, 100),
    Case("one expert gets all", SMALL, 100, hot=True),
    Case("no token is routed", SMALL, 50, holes=2.0),
    Case("one expert", MoeSizes(1, 1, 1, 300), 300),
    Case("more experts than threads", MoeSizes(3, 600, 8, 90), 90, holes=0.1),
    Case("fewer experts than threads, and many tiles", MoeSizes(1, 2, 1, 1100), 1100, holes=0.1),
]


def reference(indices: torch.Tensor, sizes: MoeSizes) -> dict[str, np.ndarray]:
    """Routes, in plain words: a stable sort of (token, k) by expert."""
    flat = indices.flatten().numpy()
    there = np.flatnonzero(flat != NONE)
    order = there[np.argsort(flat[there], kind="stable")]
    row_of = np.full(flat.shape, NONE)
    row_of[order] = np.arange(len(order))
    counts = np.bincount(flat[there], minlength=sizes.experts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return {
        "counts": counts,
        "starts": starts,
        "first": starts[:: sizes.local_experts],
        "token_of": order // sizes.topk,
        "row_of": row_of.reshape(indices.shape),
    }


def number(n: int, device: str) -> torch.Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


def same(tensor: torch.Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(tensor.cpu().numpy(), wanted)


def routed(launcher: Launcher, device: str, case: Case) -> Routing:
    kernels = MoeKernels(launcher, case.sizes)
    routing = Routing.empty(case.sizes, device)
    indices = case.indices().to(device)
    kernels.route(indices, number(case.tokens, device), routing)
    routing.check(indices)
    return routing


def check_routes(launcher: Launcher, device: str, case: Case) -> None:
    routing = routed(launcher, device, case)
    wanted = reference(case.indices()[: case.tokens], case.sizes)
    for name in ("counts", "starts", "first"):
        same(getattr(routing, name), wanted[name])
    same(routing.token_of[: len(wanted["token_of"])], wanted["token_of"])
    same(routing.row_of[: case.tokens], wanted["row_of"])


def parts_of(case: Case, widths: tuple[tuple[int, torch.dtype], ...]) -> list[torch.Tensor]:
    """Tensors of any bytes; every second one is a part of a wider one."""
    dice = torch.Generator().manual_seed(7)
    parts = []
    for i, (width, dtype) in enumerate(widths):
        rows = (case.sizes.max_tokens, (width + i % 2 * 3) * dtype.itemsize)
        raw = torch.randint(0, 256, rows, dtype=torch.uint8, generator=dice)
        parts.append(raw.view(dtype)[:, :width])
    return parts


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


#: Parts of a row: aligned, odd, long and short.
WIDTHS = (
    ((256, torch.bfloat16),),
    ((37, torch.uint8), (4, torch.float32), (5, torch.float16)),
    ((1, torch.uint8),),
    ((7168, torch.uint8), (56, torch.float32)),
)


def packed(
    launcher: Launcher, device: str, case: Case, parts: list[torch.Tensor]
) -> tuple[Routing, torch.Tensor]:
    """The rows of a rank, in its own area of the memory."""
    routing = routed(launcher, device, case)
    row = sum(part.shape[1] * part.element_size() for part in parts)
    out = torch.full((case.sizes.out_rows, -(-row // 16) * 16), 0xEE, dtype=torch.uint8)
    out = out.to(device)
    there = [part.to(device) for part in parts]
    MoeKernels(launcher, case.sizes).pack(there, number(case.tokens, device), routing, out)
    return routing, out


def check_pack(
    launcher: Launcher, device: str, case: Case, widths: tuple[tuple[int, torch.dtype], ...]
) -> None:
    parts = parts_of(case, widths)
    _, out = packed(launcher, device, case, parts)
    token_of = reference(case.indices()[: case.tokens], case.sizes)["token_of"]
    whole = torch.cat([raw(part) for part in parts], dim=1)
    rows, width = len(token_of), whole.shape[1]
    assert torch.equal(out[:rows, :width].cpu(), whole[torch.from_numpy(token_of)])
    assert bool((out[rows:] == 0xEE).all()), "more rows were written than there are"
    assert bool((out[:, width:] == 0xEE).all()), "more bytes were written than a row has"


@dataclass(frozen=True)
class Arrival:
    """Rows that came to one rank, as they lie in its memory: some of each source, then others."""

    sizes: MoeSizes
    incoming: np.ndarray
    chunks: list[Chunk]
    region: torch.Tensor
    stride: int

    @staticmethod
    def of(sizes: MoeSizes, incoming: np.ndarray, width: int, private: int = 5) -> Arrival:
        stride = -(-width // 16) * 16
        chunks, place = [], 0
        for source, rows in enumerate(int(n) for n in incoming.sum(axis=1)):
            for first, last in ((0, min(rows, private)), (min(rows, private), rows)):
                lost = source == 1 and first > 0
                chunks.append(Chunk(source, first, last - first, None if lost else place))
                place += 0 if lost else (last - first) * stride
        dice = torch.Generator().manual_seed(3)
        region = torch.randint(1, 256, (place + 16,), dtype=torch.uint8, generator=dice)
        return Arrival(sizes, incoming, chunks, region, stride)

    def places(self, multiple: int, stride: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each expert, and where each source's first row for it goes."""
        counts = self.incoming.sum(axis=0)
        sizes = -(-counts // multiple) * multiple if stride is None else counts * 0 + stride
        starts = np.concatenate([[0], np.cumsum(sizes)])
        before = np.cumsum(self.incoming, axis=0) - self.incoming
        return starts, starts[:-1] + before

    def rows(self, multiple: int, stride: int | None) -> list[tuple[int, int | None]]:
        """Of each row that came: where it goes, and where it lies."""
        _, targets = self.places(multiple, stride)
        order = [
            [int(targets[s, e]) + i for e in range(self.incoming.shape[1]) for i in range(n[e])]
            for s, n in enumerate(self.incoming)
        ]
        return [
            (order[c.source][c.first + i], None if c.place is None else c.place + i * self.stride)
            for c in self.chunks
            for i in range(c.rows)
        ]

    def tables(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk more than there are: it would be seen."""
        table = [*Chunk.table(self.chunks), [1 << 60, 0, 0]]
        words = torch.tensor(table, dtype=torch.int64, device=device)
        return words, number(len(self.chunks), device)


ARRIVALS = [
    np.zeros((4, 4), dtype=np.int32),
    np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=np.int32),
    np.array([[3, 2, 9, 1], [20, 5, 0, 0], [0, 0, 0, 7], [1, 1, 1, 1]], dtype=np.int32),
    np.array([[100, 100, 50, 50], [0, 0, 0, 300], [0] * 4, [75] * 4], dtype=np.int32),
]
ORDERS: list[tuple[int, int | None]] = [(1, None), (16, None), (1, 475)]


def placed(
    launcher: Launcher, device: str, arrival: Arrival, order: tuple[int, int | None], room: int
) -> Placement:
    placement = Placement.empty(arrival.sizes, device)
    # Routes blocks have other words before and behind the counts.
    local = arrival.sizes.local_experts
    words = torch.full((arrival.sizes.ranks, local + 9), 77, dtype=torch.int32)
    words[:, 4 : 4 + local] = torch.from_numpy(arrival.incoming)
    incoming = words.to(device)[:, 4 : 4 + local]
    kernels = MoeKernels(launcher, arrival.sizes)
    kernels.place(incoming, placement, room=room, multiple=order[0], stride=order[1])
    return placement


def check_hand_out(
    launcher: Launcher, device: str, incoming: np.ndarray, order: tuple[int, int | None]
) -> None:
    """And the same rows back again, as answers."""
    sizes = MoeSizes(ranks=4, experts=16, topk=4, max_tokens=300)
    widths = (50, 14)
    arrival = Arrival.of(sizes, incoming, sum(widths))
    starts, targets = arrival.places(*order)
    room = int(starts[-1])
    placement = placed(launcher, device, arrival, order, room)
    placement.check()
    same(placement.starts, starts)
    same(placement.counts, incoming.sum(axis=0))
    same(placement.targets, targets)

    kernels = MoeKernels(launcher, sizes)
    chunks, count = arrival.tables(device)
    out = [torch.full((room, w), 0xEE, dtype=torch.uint8, device=device) for w in widths]
    region = arrival.region.to(device)
    each, layout = order[1], None
    if each is not None:
        layout = torch.full((sizes.local_experts, sizes.ranks), -1, device=device)
        # Again, for a layout.
        kernels.place(
            torch.from_numpy(incoming).to(device), placement, room=room, stride=each, layout=layout
        )
    kernels.hand_out(
        placement, chunks, count, region, arrival.stride, out, layout=layout, stride=each
    )
    if each is not None and layout is not None:
        came = np.zeros((sizes.local_experts, sizes.ranks), dtype=np.int64)
        for chunk in arrival.chunks:
            of = np.repeat(np.arange(sizes.local_experts), incoming[chunk.source])
            if chunk.place is not None:
                np.add.at(came, (of[chunk.first :][: chunk.rows], chunk.source), 1)
        first = targets.T - starts[:-1, None]
        same(layout, np.where(came > 0, first.astype(np.int64) << 32 | came, 0))
    wanted = torch.full((room, sum(widths)), 0xEE, dtype=torch.uint8)
    for to, place in arrival.rows(*order):
        wanted[to] = 0 if place is None else arrival.region[place : place + sum(widths)]
    whole = torch.cat(out, dim=1)
    assert torch.equal(whole.cpu(), wanted)

    back = torch.full_like(region, 0xDD)
    kernels.pack_answers(placement, chunks, count, whole, back, arrival.stride)
    sent = torch.full_like(arrival.region, 0xDD)
    for _, place in arrival.rows(*order):
        if place is not None:
            sent[place : place + sum(widths)] = arrival.region[place : place + sum(widths)]
    assert torch.equal(back.cpu(), sent)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SUMS = [*itertools.product(FLOATS, FLOATS)]


def summed(
    answers: torch.Tensor,
    row_of: np.ndarray,
    weights: torch.Tensor | None,
    out: torch.dtype,
    missing: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """One product and one sum after the other, in float32."""
    total = torch.zeros(len(row_of), answers.shape[1])
    for token, rows in enumerate(row_of):
        for k, row in enumerate(rows):
            if row != NONE and int(row) not in missing:
                value = answers[row].float()
                total[token] += value if weights is None else weights[token, k] * value
    return total.to(out)


def check_sum(
    launcher: Launcher,
    device: str,
    case: Case,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    elements: int = 72,
    weighted: bool = True,
    lost: int | None = None,
) -> None:
    routing = routed(launcher, device, case)
    sizes, (given, taken) = case.sizes, dtypes
    dice = torch.Generator().manual_seed(9)
    answers = torch.randn(sizes.out_rows, elements, generator=dice).mul(100).to(given)
    weights = torch.rand(sizes.max_tokens, sizes.topk, generator=dice) if weighted else None
    missing = torch.zeros(sizes.ranks, dtype=torch.uint8)
    wanted = reference(case.indices()[: case.tokens], sizes)
    without: frozenset[int] = frozenset()
    if lost is not None:
        missing[lost] = 1
        without = frozenset(range(wanted["first"][lost], wanted["first"][lost + 1]))
    out = torch.full((sizes.max_tokens, elements), 7.0, dtype=taken, device=device)
    MoeKernels(launcher, sizes).sum(
        answers.to(device),
        number(case.tokens, device),
        routing,
        out,
        weights=None if weights is None else weights.to(device),
        missing=missing.to(device) if lost is not None else None,
    )
    sums = summed(answers, wanted["row_of"], weights, taken, without)
    assert torch.equal(raw(out[: case.tokens].cpu()), raw(sums)), "not the same bits"
    assert bool((out[case.tokens :] == 7.0).all()), "more sums than tokens"


CASTS = (
    (torch.float32, False),
    (torch.float32, True),
    (torch.float8_e8m0fnu, True),
    (torch.int32, True),
)


def check_cast(
    launcher: Launcher, device: str, scales: torch.dtype, *, powers_of_two: bool
) -> None:
    """Every bfloat16, in blocks of one sign and size, in mixed ones, and beside what isn't finite:
    the bits of torch."""
    every = patterns(torch.bfloat16)
    dice = torch.Generator().manual_seed(13)
    mixed = every[torch.randperm(len(every), generator=dice)]
    small = torch.randn(1 << 14, generator=dice).mul(0.02).to(torch.bfloat16)
    x = torch.cat([every, mixed, small]).view(-1, 512).to(device)
    form = cast.Fp8Form(128, scales, powers_of_two)
    values, scaled = form.cast(x)
    into = (torch.full_like(values, 1.0), torch.zeros_like(scaled))
    sizes = MoeSizes(ranks=1, experts=1, topk=1, max_tokens=len(x))
    MoeKernels(launcher, sizes).cast(x, into, block=128, powers_of_two=powers_of_two)
    numbers = ~values.float().isnan()
    assert torch.equal(into[0].float().isnan(), ~numbers)
    assert torch.equal(raw(into[0])[numbers], raw(values)[numbers])
    if scales != torch.float32:
        assert torch.equal(raw(into[1]), raw(scaled))
        return
    there = ~scaled.isnan()
    assert torch.equal(into[1].isnan(), ~there)
    assert torch.equal(into[1][there], scaled[there])


def check_meetings(launcher: Launcher, device: str) -> None:
    """Routes of many tiles, rows packed by them and handed out, as one launch: each step reads what
    all blocks have written in the one before."""
    sizes = MoeSizes(ranks=1, experts=16, topk=3, max_tokens=700)
    case = Case("meetings", sizes, 700, holes=0.2)
    wanted = reference(case.indices(), sizes)
    meeting = torch.zeros(MEETING_WORDS, dtype=torch.int64, device=device)
    steps = Steps(launcher, meeting)
    kernels = MoeKernels(steps, sizes)
    routing, placement = Routing.empty(sizes, device), Placement.empty(sizes, device)
    indices, now = case.indices().to(device), number(case.tokens, device)
    x = torch.arange(700 * 12, dtype=torch.int32, device=device).view(700, 12)
    own = torch.zeros(sizes.out_rows, 48, dtype=torch.uint8, device=device)
    rows, one = len(wanted["token_of"]), number(1, device)
    chunks = torch.tensor(Chunk.table([Chunk(0, 0, rows, 0)]), device=device)
    by_expert = x.cpu()[torch.from_numpy(wanted["token_of"])]
    for _ in range(20):
        own.zero_()
        routing.row_of.fill_(-1)
        out = torch.zeros(rows, 12, dtype=torch.int32, device=device)
        with steps.together():
            kernels.route(indices, now, routing)
            kernels.pack([x], now, routing, own)
            kernels.place(routing.counts.view(1, -1), placement, room=rows)
            kernels.hand_out(placement, chunks, one, own, 48, [out])
        assert torch.equal(out.cpu(), by_expert)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a format: all of a short one, and of float32 those in the middle of two others."""
    if dtype is not torch.float32:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    dice = torch.Generator().manual_seed(11)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64, generator=dice)
    for place, ones in enumerate((0x8000, 0x7FFF, 0x8001, 0x18000, 0x1000, 0xFFF, 0x1001, 0x3000)):
        bits[place::16] = bits[place::16] & ~0x1FFFF | ones
    # Where half precision ends, and where it begins to be coarser.
    small = torch.arange(-(1 << 14), 1 << 14, dtype=torch.float32) * 2.0**-26
    large = torch.arange(65000, 66000, dtype=torch.float32)
    values = bits.to(torch.int32).view(torch.float32)
    return torch.cat([values, small, large, torch.zeros(24)])


def check_rounding(launcher: Launcher, device: str, given: torch.dtype, taken: torch.dtype) -> None:
    values = patterns(given)
    tokens, wide = len(values) // 1024, 1024
    values = values[: tokens * wide]
    sizes = MoeSizes(ranks=1, experts=1, topk=1, max_tokens=tokens)
    kernels, routing = MoeKernels(launcher, sizes), Routing.empty(sizes, device)
    now = number(tokens, device)
    indices = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    kernels.route(indices, now, routing)
    out = torch.empty(tokens, wide, dtype=taken, device=device)
    kernels.sum(values.view(tokens, wide).to(device), now, routing, out)
    sums, wanted = out.cpu().flatten(), (values.float() + 0.0).to(taken)
    numbers = ~wanted.isnan()
    assert torch.equal(sums.isnan(), ~numbers)
    assert torch.equal(raw(sums[numbers]), raw(wanted[numbers]))
