"""The kernels of expert parallelism on the processor, beside those that it has of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Chunk, MoeKernels, MoeSizes, Placement, Routing, Steps
from fabric_ray.kernels.steps import MEETING_WORDS
from fabric_ray.moe import AllToAll, RowPart
from tests import moe_kernels as checks
from tests.host_kernels import THREADS, Host

CPU = "cpu"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("kernels"))


def name(case: checks.Case) -> str:
    return case.name


@pytest.mark.parametrize("case", checks.CASES, ids=name)
def test_rows_are_in_the_order_of_experts_and_tokens(host: Host, case: checks.Case) -> None:
    checks.check_routes(host, CPU, case)


def test_routes_are_those_of_the_processor(host: Host) -> None:
    """The numbers that native/moe's own test names."""
    sizes = MoeSizes(ranks=2, experts=4, topk=2, max_tokens=4)
    routing = Routing.empty(sizes, CPU)
    indices = torch.tensor([[3, 0], [-1, 3], [0, 2]])
    MoeKernels(host, sizes).route(indices, checks.number(3, CPU), routing)
    routing.check(indices)
    assert routing.counts.tolist() == [2, 0, 1, 2]
    assert routing.token_of[:5].tolist() == [0, 2, 2, 0, 1]
    assert routing.row_of[:3].flatten().tolist() == [3, 0, -1, 4, 1, 2]
    assert routing.first.tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("indices", "tokens", "said"),
    [
        ([[0, 4], [9, 1]], 2, r"token 0 goes to expert 4, and there are 4 from 0"),
        ([[0, -2], [1, 0]], 2, r"token 0 goes to expert -2"),
        ([[0, 1], [1, 1]], 2, r"token 1 goes to expert 1 twice"),
        ([[0, 1], [1, 0]], 3, r"more tokens than there is room for"),
        ([[2, 2], [7, 7]], 2, r"token 0 goes to expert 2 twice"),
    ],
)
def test_the_first_token_that_can_go_nowhere_is_told(
    host: Host, indices: list[list[int]], tokens: int, said: str
) -> None:
    sizes = MoeSizes(ranks=2, experts=4, topk=2, max_tokens=2)
    routing, given = Routing.empty(sizes, CPU), torch.tensor(indices)
    MoeKernels(host, sizes).route(given, checks.number(tokens, CPU), routing)
    with pytest.raises(InvalidArgument, match=said):
        routing.check(given)


@pytest.mark.parametrize("widths", checks.WIDTHS, ids=str)
@pytest.mark.parametrize("case", checks.CASES[:5], ids=name)
def test_rows_are_packed_whole_and_nothing_else_is_written(
    host: Host, case: checks.Case, widths: tuple[tuple[int, torch.dtype], ...]
) -> None:
    checks.check_pack(host, CPU, case, widths)


@pytest.mark.parametrize(("scales", "powers_of_two"), checks.CASTS, ids=str)
def test_tokens_are_cast_to_the_bits_of_torch(
    host: Host, scales: torch.dtype, powers_of_two: bool
) -> None:
    checks.check_cast(host, CPU, scales, powers_of_two=powers_of_two)


@pytest.mark.parametrize("warps", [2, pytest.param(5, marks=pytest.mark.long)])
def test_blocks_of_several_warps_do_the_same(tmp_path: Path, warps: int) -> None:
    """As on a GPU, where warps of a block share sums, rows and chunks."""
    host = Host(tmp_path, threads=warps * THREADS)
    for case in checks.CASES:
        checks.check_routes(host, CPU, case)
    checks.check_pack(host, CPU, checks.CASES[3], checks.WIDTHS[1])
    for order in checks.ORDERS:
        checks.check_hand_out(host, CPU, checks.ARRIVALS[3], order)
    checks.check_sum(host, CPU, checks.CASES[3], checks.SUMS[4])
    checks.check_cast(host, CPU, torch.float8_e8m0fnu, powers_of_two=True)
    checks.check_meetings(host.another(3), CPU)


def test_steps_of_one_launch_see_what_all_blocks_have_done(host: Host) -> None:
    checks.check_meetings(host.another(3), CPU)


@pytest.mark.parametrize("largest", ["run_steps", "sum_bf16_bf16", "sum_f32_f16"])
def test_a_launch_of_any_kernel_fits_beside_one_that_waits(largest: str) -> None:
    """However the blocks of the first lie: an SM with three of one kernel has no room for one of a
    larger kernel, of which two fit, be it another exchange's."""
    blocks: list[int] = []

    class Fits:
        def launch(self, file: str, kernel: str, n: int, *_: object, **_options: object) -> None:
            blocks.append(n)

        def resident(self, file: str, kernel: str, threads: int) -> int:
            return 132 * (2 if kernel == largest else 3)

    sizes = MoeSizes(ranks=1, experts=1, topk=1, max_tokens=400)
    steps = Steps(Fits(), torch.zeros(MEETING_WORDS, dtype=torch.int64))
    kernels, routing = MoeKernels(steps, sizes), Routing.empty(sizes, CPU)
    x, now = torch.zeros(400, 8, dtype=torch.bfloat16), checks.number(400, CPU)
    with steps.together():
        kernels.pack([x], now, routing, torch.zeros(400, 16, dtype=torch.uint8))
    with steps.together():
        kernels.sum(x, now, routing, torch.zeros_like(x))
    assert blocks == [132, 132]


@pytest.mark.parametrize("order", checks.ORDERS, ids=str)
@pytest.mark.parametrize("incoming", checks.ARRIVALS, ids=lambda a: f"{a.sum()} rows")
def test_rows_go_to_their_experts_and_answers_back(
    host: Host, incoming: np.ndarray, order: tuple[int, int | None]
) -> None:
    checks.check_hand_out(host, CPU, incoming, order)


@pytest.mark.parametrize(
    ("incoming", "options", "said"),
    [
        ([[9, 0], [1, 1]], {"room": 99}, "rank 0 sends more rows"),
        ([[0, 0], [-1, 3]], {"room": 99}, "rank 1 sends"),
        ([[2, 4], [1, 4]], {"room": 99, "stride": 7}, "local expert 1 gets more rows"),
        ([[2, 4], [1, 4]], {"room": 10}, "11 rows arrive"),
        ([[2, 4], [1, 4]], {"room": 15, "multiple": 8}, "16 rows arrive"),
        ([[1, 0], [0, 1]], {"room": 99, "stride": (1 << 31) - 1}, "rows arrive"),
    ],
)
def test_rs_1_what_a_peer_says_is_checked_before_a_row_is_moved(
    host: Host, incoming: list[list[int]], options: dict[str, int], said: str
) -> None:
    sizes = MoeSizes(ranks=2, experts=4, topk=2, max_tokens=4)
    kernels, placement = MoeKernels(host, sizes), Placement.empty(sizes, CPU)
    kernels.place(torch.tensor(incoming, dtype=torch.int32), placement, **options)
    with pytest.raises(InvalidArgument, match=said):
        placement.check()
    out = torch.full((16, 16), 7, dtype=torch.uint8)
    chunks = torch.tensor(Chunk.table([Chunk(0, 0, 1, 0)]))
    region = torch.zeros(16, dtype=torch.uint8)
    kernels.hand_out(placement, chunks, checks.number(1, CPU), region, 16, [out])
    assert bool((out == 7).all())


@pytest.mark.parametrize("dtypes", checks.SUMS, ids=str)
def test_sums_have_the_same_bits_in_every_format(
    host: Host, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    checks.check_sum(host, CPU, checks.CASES[2], dtypes)


@pytest.mark.parametrize("case", checks.CASES, ids=name)
def test_sums_of_any_tokens(host: Host, case: checks.Case) -> None:
    checks.check_sum(host, CPU, case, (torch.bfloat16, torch.float32), elements=21)


@pytest.mark.parametrize("dtypes", checks.SUMS, ids=str)
def test_every_number_is_rounded_as_torch_rounds_it(
    host: Host, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    checks.check_rounding(host, CPU, *dtypes)


def test_answers_of_lost_ranks_add_nothing(host: Host) -> None:
    for lost in range(4):
        dtypes = (torch.float16, torch.float16)
        checks.check_sum(host, CPU, checks.CASES[3], dtypes, weighted=False, lost=lost)


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_exchange_by_kernels_and_one_by_the_processor_have_the_same_bits(
    host: Host, dtype: torch.dtype, weighted: bool
) -> None:
    case = checks.Case("exchange", MoeSizes(1, 8, 3, 40), 33, holes=0.2)
    sizes, hidden, tokens = case.sizes, 72, case.tokens
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=dice).to(dtype)
    scales = torch.randn(tokens, 3, generator=dice)
    indices = case.indices()[:tokens].contiguous()
    weights = torch.rand(tokens, sizes.topk, generator=dice) if weighted else None
    factors = torch.randn(256, 1, generator=dice)

    with TransferEngine(transport="shm") as engine:
        part = RowPart("scales", 3, torch.float32)
        options = {"experts": sizes.experts, "topk": sizes.topk, "max_tokens": sizes.max_tokens}
        rank = AllToAll(
            engine, rank=0, ranks=1, hidden=hidden, dtype=dtype, parts=[part],
            answer_dtype=dtype, **options,
        )  # fmt: skip
        rank.connect([rank.descriptor()])
        rank.dispatch_send(x, indices, scales=scales)
        theirs = rank.dispatch_recv(multiple=8)
        answers = (theirs.x.float() * factors[: len(theirs.x)]).to(dtype)
        rank.combine_send(answers)
        their_sums = rank.combine_recv(weights, dtype=torch.float32)

    kernels = MoeKernels(host, sizes)
    routing, placement = Routing.empty(sizes, CPU), Placement.empty(sizes, CPU)
    now = checks.number(tokens, CPU)
    kernels.route(indices, now, routing)
    stride = -(-(hidden * dtype.itemsize + 12) // 16) * 16
    own = torch.zeros(sizes.out_rows, stride, dtype=torch.uint8)
    kernels.pack([x, scales], now, routing, own)
    room = len(theirs.x)
    kernels.place(routing.counts.view(1, -1), placement, room=room, multiple=8)
    rows = int(routing.starts[-1])
    chunks = torch.tensor(Chunk.table([Chunk(0, 0, rows, 0)]))
    out = [torch.empty(room, hidden, dtype=dtype), torch.empty(room, 3)]
    kernels.hand_out(placement, chunks, checks.number(1, CPU), own, stride, out)
    placement.check()
    assert placement.counts.tolist() == theirs.counts.tolist()
    assert placement.starts[:-1].tolist() == theirs.starts.tolist()
    for expert in range(sizes.experts):
        for ours, other in zip(out, (theirs.x, theirs.parts["scales"]), strict=True):
            of = theirs.of(expert)
            assert torch.equal(checks.raw(ours[of]), checks.raw(other[of]))

    back = torch.zeros(sizes.out_rows, hidden, dtype=dtype)
    kernels.pack_answers(
        placement, chunks, checks.number(1, CPU), answers, back, hidden * dtype.itemsize
    )
    sums = torch.empty(tokens, hidden)
    kernels.sum(back, now, routing, sums, weights=weights)
    assert torch.equal(checks.raw(sums), checks.raw(their_sums))
