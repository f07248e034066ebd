"""The kernels of expert parallelism and of the channel, on a GPU; times are printed (``-s``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric_ray.kernels import Cache, Chunk, Device, MoeKernels, MoeSizes, Placement, Routing
from tests import channel_kernels, moe_kernels
from tests.gpu import figures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = "cuda"


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(torch.cuda.current_device())


def name(case: moe_kernels.Case) -> str:
    return case.name


@pytest.mark.parametrize("case", moe_kernels.CASES, ids=name)
def test_routes_on_a_gpu(device: Device, case: moe_kernels.Case) -> None:
    moe_kernels.check_routes(device, GPU, case)


@pytest.mark.parametrize("widths", moe_kernels.WIDTHS, ids=str)
@pytest.mark.parametrize("case", moe_kernels.CASES[:5], ids=name)
def test_packed_rows_on_a_gpu(
    device: Device, case: moe_kernels.Case, widths: tuple[tuple[int, torch.dtype], ...]
) -> None:
    moe_kernels.check_pack(device, GPU, case, widths)


@pytest.mark.parametrize("order", moe_kernels.ORDERS, ids=str)
@pytest.mark.parametrize("incoming", moe_kernels.ARRIVALS, ids=lambda a: f"{a.sum()} rows")
def test_rows_to_experts_and_answers_back_on_a_gpu(
    device: Device, incoming: np.ndarray, order: tuple[int, int | None]
) -> None:
    moe_kernels.check_hand_out(device, GPU, incoming, order)


@pytest.mark.parametrize("dtypes", moe_kernels.SUMS, ids=str)
@pytest.mark.parametrize("case", moe_kernels.CASES, ids=name)
@pytest.mark.parametrize("elements", [72, 21])
def test_sums_on_a_gpu_have_the_bits_of_the_processor(
    device: Device,
    case: moe_kernels.Case,
    dtypes: tuple[torch.dtype, torch.dtype],
    elements: int,
) -> None:
    moe_kernels.check_sum(device, GPU, case, dtypes, elements=elements)
    lost = case.sizes.ranks - 1
    moe_kernels.check_sum(device, GPU, case, dtypes, weighted=False, lost=lost)


@pytest.mark.parametrize("dtypes", moe_kernels.SUMS, ids=str)
def test_every_number_is_rounded_as_the_processor_does(
    device: Device, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    moe_kernels.check_rounding(device, GPU, *dtypes)


@pytest.mark.parametrize(("scales", "powers_of_two"), moe_kernels.CASTS, ids=str)
def test_tokens_are_cast_to_the_bits_of_torch(
    device: Device, scales: torch.dtype, powers_of_two: bool
) -> None:
    moe_kernels.check_cast(device, GPU, scales, powers_of_two=powers_of_two)


def test_steps_of_one_launch_see_what_all_blocks_have_done(device: Device) -> None:
    moe_kernels.check_meetings(device, GPU)


def test_a_captured_graph_serves_any_number_of_tokens(device: Device) -> None:
    """Captured once, replayed with other tokens, routes and chunks in the same buffers."""
    sizes = MoeSizes(ranks=1, experts=16, topk=3, max_tokens=100)
    hidden, room = 40, 16 * 100
    kernels, routing = MoeKernels(device, sizes), Routing.empty(sizes, GPU)
    placement = Placement.empty(sizes, GPU)
    indices = torch.zeros(sizes.max_tokens, sizes.topk, dtype=torch.int64, device=GPU)
    x = torch.randn(sizes.max_tokens, hidden, device=GPU)
    weights = torch.rand(sizes.max_tokens, sizes.topk, device=GPU)
    tokens, count = moe_kernels.number(0, GPU), moe_kernels.number(1, GPU)
    chunks = torch.zeros(4, 3, dtype=torch.int64, device=GPU)
    own = torch.zeros(sizes.out_rows, hidden * 4, dtype=torch.uint8, device=GPU)
    out, back = (
        torch.zeros(room, hidden, device=GPU),
        torch.zeros(sizes.out_rows, hidden, device=GPU),
    )
    sums = torch.zeros(sizes.max_tokens, hidden, device=GPU)

    def step() -> None:
        kernels.route(indices, tokens, routing)
        kernels.pack([x], tokens, routing, own)
        kernels.place(routing.counts.view(1, -1), placement, room=room, multiple=8)
        kernels.hand_out(placement, chunks, count, own, hidden * 4, [out])
        kernels.pack_answers(placement, chunks, count, out, back, hidden * 4)
        kernels.sum(back, tokens, routing, sums, weights=weights)

    step()  # compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for n, hot, holes in ((100, False, 0.0), (0, False, 0.0), (1, True, 0.0), (63, True, 0.4)):
        case = moe_kernels.Case("graph", sizes, n, hot=hot, holes=holes)
        here = case.indices()
        wanted = moe_kernels.reference(here[:n], sizes)
        rows = len(wanted["token_of"])
        halves = [Chunk(0, 0, rows // 2, 0), Chunk(0, rows // 2, rows - rows // 2, rows // 2 * 160)]
        indices.copy_(here)
        tokens.fill_(n)
        chunks[:2] = torch.tensor(Chunk.table(halves))
        count.fill_(2)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        routing.check(indices)
        placement.check()
        answers = x.cpu()[torch.from_numpy(wanted["token_of"])]
        assert torch.equal(back[:rows].cpu(), answers), f"{n} tokens"
        expected = moe_kernels.summed(answers, wanted["row_of"], weights.cpu(), torch.float32)
        assert torch.equal(sums[:n].cpu(), expected), f"{n} tokens"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("n", [1, 33, 5000])
def test_commands_that_kernels_push_come_once_and_whole(
    device: Device, n: int, at_once: bool
) -> None:
    channel_kernels.check_push(device, GPU, n=n, capacity=64, at_once=at_once)


def test_a_full_fifo_ends_a_kernels_wait(device: Device) -> None:
    channel_kernels.check_full(device, GPU)


def test_a_kernel_learns_that_its_command_is_complete(device: Device) -> None:
    channel_kernels.check_wait_command(device, GPU)


def test_rs_4_a_kernels_wait_for_a_word_always_ends(device: Device) -> None:
    channel_kernels.check_wait_word(device, GPU)


def test_rs_1_a_table_comes_with_its_word_or_not_at_all(device: Device) -> None:
    channel_kernels.check_fetch(device, GPU)


def test_mr_1_tokens_of_an_exchange_that_begins_too_early_are_none(device: Device) -> None:
    channel_kernels.check_begin(device, GPU)


def test_a_command_comes_after_what_is_read_with_it(device: Device) -> None:
    channel_kernels.check_tell(device, GPU)


def test_a_second_process_takes_kernels_from_the_cache(device: Device, tmp_path: Path) -> None:
    first, again = (Device(device.index, Cache(tmp_path)) for _ in range(2))
    for one in (first, again):
        moe_kernels.check_routes(one, GPU, moe_kernels.CASES[2])
    assert len(list(tmp_path.iterdir())) == 1


def microseconds(work: Callable[[], None], rounds: int = 50) -> float:
    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / rounds


def copied() -> float:
    """Bytes that a copy reads and writes in a microsecond."""
    big = torch.randint(0, 256, (1 << 29,), dtype=torch.uint8, device=GPU)
    other = torch.empty_like(big)
    return 2 * big.numel() / microseconds(lambda: other.copy_(big), 5)


#: Of the rate of a copy, at so many tokens; with fewer the launch counts.
LEAST, MANY = 0.8, 4096


@pytest.mark.parametrize("tokens", [1, 128, MANY])
def test_how_far_kernels_are_from_their_memory_traffic(device: Device, tokens: int) -> None:
    """DeepSeek-V3's shape. The floor: the bytes to be read and written, at the rate of a copy; of
    what moves next to none, so many launches."""
    sizes = MoeSizes(ranks=1, experts=256, topk=8, max_tokens=tokens)
    hidden, width = 7168, 7168 + 224
    rate = copied()
    case = moe_kernels.Case("floor", sizes, tokens)
    kernels, indices = MoeKernels(device, sizes), case.indices().to(GPU)
    routing, placement = Routing.empty(sizes, GPU), Placement.empty(sizes, GPU)
    now, rows = moe_kernels.number(tokens, GPU), sizes.out_rows
    launch = microseconds(lambda: now.add_(0))

    def any_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=GPU)

    kernels.route(indices, now, routing)
    x, scales = any_bytes(tokens, hidden), torch.rand(tokens, 56, device=GPU)
    own = any_bytes(rows, width)
    out = [torch.empty_like(any_bytes(rows, hidden)), torch.empty(rows, 56, device=GPU)]
    answers = torch.randn(rows, hidden, device=GPU).to(torch.bfloat16)
    back = torch.empty_like(answers)
    sums = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=GPU)
    weights = torch.rand(tokens, 8, device=GPU)
    chunks = torch.tensor(Chunk.table([Chunk(0, 0, rows, 0)]), device=GPU)
    one = moe_kernels.number(1, GPU)

    def place() -> None:
        kernels.place(routing.counts.view(1, -1), placement, room=rows)

    place()
    placement.check()
    steps: list[tuple[str, int, Callable[[], None]]] = [
        ("pack", (tokens + rows) * width, lambda: kernels.pack([x, scales], now, routing, own)),
        (
            "hand out",
            2 * rows * width,
            lambda: kernels.hand_out(placement, chunks, one, own, width, out),
        ),
        (
            "pack answers",
            4 * rows * hidden,
            lambda: kernels.pack_answers(placement, chunks, one, answers, back, 2 * hidden),
        ),
        (
            "sum",
            2 * (rows + tokens) * hidden,
            lambda: kernels.sum(answers, now, routing, sums, weights=weights),
        ),
    ]
    figures.note(f"{tokens} tokens: a copy, GB/s", rate / 1e3)
    figures.note(f"{tokens} tokens: a launch in a graph, us", launch)
    launched: list[tuple[str, int, Callable[[], None]]] = [
        ("route", 3, lambda: kernels.route(indices, now, routing)),
        ("place", 1, place),
    ]
    for what, launches, work in launched:
        aim = f"a floor of {launches * launch:.3g}"
        figures.note(f"{tokens} tokens: {what}, us", microseconds(work), aim=aim)
    reached = {}
    for what, nbytes, work in steps:
        took, floor = microseconds(work), nbytes / rate
        figures.note(f"{tokens} tokens: {what}, us", took, aim=f"a floor of {floor:.3g}")
        reached[what] = floor / took
    if tokens < MANY:
        return
    aim = f"at least {LEAST}"
    for what, part in reached.items():
        figures.note(f"{tokens} tokens: {what}, of its floor", part, aim=aim, met=part >= LEAST)
    assert all(part >= LEAST for part in reached.values()), reached
