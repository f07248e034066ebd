"""Results are the same bits whatever torch's default dtype and device are (RS-1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric_ray import TransferEngine
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import tiny
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.moe import cast
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from fabric_ray.moe.deepep import Buffer, ElasticBuffer
from fabric_ray.moe.tokens import summed
from fabric_ray.weights.quant import Cast, Format, Fp8, Int8, quantise
from tests.moe_ranks import ThreadComm, batch, on_ranks
from tests.unit.inference.engines import prefill, shuffled, step, text
from tests.unit.moe.test_pplx_face import HIDDEN as WIDTH
from tests.unit.moe.test_pplx_face import made
from tests.unit.quant.local import held, plain_bytes, prepared
from tests.unit.weights.quantised_model import CONVERTED, SHAPES, TRAINERS, full, side

EXPERTS, TOPK, M, HIDDEN, RANKS = 8, 3, 9, 256, 2
BATCHES = [batch(5 + rank, M - rank, EXPERTS, TOPK, HIDDEN) for rank in range(RANKS)]


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, list | tuple) else []


def check(work: Callable[..., Any], ranks: int = 0) -> None:
    """That ``work``, on each of the ranks if there are any, has the same bits under defaults that
    no tensor of ours can have: bfloat16, on a device without memory."""

    def done(device: str) -> list[Tensor]:
        def here(*comm: ThreadComm) -> Any:
            with torch.device(device):  # of this thread alone
                return work(*comm)

        return tensors(on_ranks(ranks, here) if ranks else here())

    expected = done("cpu")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = done("meta")
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(found) == len(expected) > 0
    for ours, plain in zip(found, expected, strict=True):
        assert (ours.dtype, ours.device) == (plain.dtype, plain.device)
        assert torch.equal(plain_bytes(ours.contiguous()), plain_bytes(plain.contiguous()))


def answers(x: Tensor) -> Tensor:
    """Another multiple of each row: bfloat16 can't hold their sums."""
    rows = x[..., 0].numel()
    by = torch.arange(1, rows + 1, dtype=torch.float32, device="cpu") / 7
    return (x.float() * by.view(*x.shape[:-1], 1)).to(torch.bfloat16)


@pytest.mark.parametrize("fp8", [False, True])
def test_rs_1_low_latency_calls_follow_no_default(fp8: bool) -> None:
    def work(comm: ThreadComm) -> Any:
        x, idx, w = BATCHES[comm.rank()]
        buffer = Buffer(None, 0, 0, low_latency_mode=True, comm=comm)
        got, counts, handle, *_ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=fp8)
        y = cast.back(*got) if isinstance(got, tuple) else answers(got)
        kept = idx.clone()
        kept[0, 0] = -1
        sums, *_ = buffer.low_latency_combine(y, kept, w, handle)
        mask = torch.full((RANKS,), 7, dtype=torch.int32, device="cpu")
        buffer.low_latency_query_mask_buffer(mask)
        buffer.destroy()
        src_info = [row[:count] for row, count in zip(handle[0], counts.tolist(), strict=True)]
        return counts, src_info, handle[1], sums, mask

    check(work, RANKS)


@pytest.mark.parametrize("per_node", [1, RANKS])
def test_rs_1_normal_calls_follow_no_default(per_node: int) -> None:
    def work(comm: ThreadComm) -> Any:
        x, idx, w = BATCHES[comm.rank()]
        buffer = Buffer(None, comm=comm, ranks_per_node=per_node)
        layout = buffer.get_dispatch_layout(idx, EXPERTS)
        per_rank, _, per_expert, in_rank, _ = layout
        got = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w, 4, 64)
        received, found, weights, _, handle, _ = got
        assert isinstance(received, Tensor)
        sums = buffer.combine(answers(received), handle, weights, bias=(x, x))
        buffer.destroy()
        return list(layout), received, found, weights, sums

    check(work, RANKS)


@pytest.mark.parametrize("expand", [False, True])
def test_rs_1_elastic_calls_follow_no_default(expand: bool) -> None:
    def work(comm: ThreadComm) -> Any:
        x, idx, w = BATCHES[comm.rank()]
        buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M, ranks_per_node=RANKS)
        got = buffer.dispatch(x, idx, w, num_experts=EXPERTS, do_expand=expand, expert_alignment=4)
        received, found, weights, handle, _ = got
        assert isinstance(received, Tensor)
        sums = buffer.combine(answers(received), handle, weights)
        buffer.destroy()
        return received, found, weights, handle.recv_src_metadata, sums

    check(work, RANKS)


@pytest.mark.parametrize("per_node", [None, 1])
def test_rs_1_gradients_follow_no_default(per_node: int | None) -> None:
    def work(comm: ThreadComm) -> Any:
        x, idx, w = BATCHES[comm.rank()]
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        with TransferEngine(name=f"rank-{comm.rank()}", transport="shm") as engine:
            exchange = Differentiable(
                engine, rank=comm.rank(), ranks=RANKS, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
                max_tokens=M, ranks_per_node=per_node,
            )  # fmt: skip
            exchange.connect(comm.all_gather(exchange.descriptor()))
            comm.all_gather(b"")
            got = dispatch(exchange, x, idx, weights=w)
            first = combine(exchange, answers(got.x))
            # A second exchange in between: the way back goes over the first one's again.
            second = combine(exchange, answers(dispatch(exchange, x, idx, weights=w).x))
            (first.float().sum() + second.float().square().sum()).backward()
            comm.all_gather(b"")
        return first.detach(), second.detach(), x.grad, w.grad

    check(work, RANKS)


def test_rs_1_pplx_calls_follow_no_default() -> None:
    given = [batch(5 + rank, M, EXPERTS, TOPK, WIDTH) for rank in range(RANKS)]
    bound = torch.tensor([M - 2], dtype=torch.uint32)

    def work(comm: ThreadComm) -> Any:
        x, _, w = given[comm.rank()]
        there = made(comm.rank(), RANKS, comm=comm)
        local, rows = EXPERTS // RANKS, M * RANKS
        counts = torch.zeros(local, dtype=torch.int32, device="cpu")
        received = torch.zeros(local, rows, WIDTH, dtype=torch.bfloat16, device="cpu")
        out = torch.zeros(M, WIDTH, dtype=torch.bfloat16, device="cpu")
        indices = w.argsort(1).to(torch.uint32)
        there.dispatch(counts, received, None, x, None, indices, bound)
        there.combine(out, indices, w, answers(received), bound)
        there.destroy()
        return counts, received, out

    check(work, RANKS)


def test_rs_1_sums_of_single_answers_follow_no_default() -> None:
    x, idx, w = BATCHES[0]
    single = answers(x)[:, None].expand(-1, TOPK, -1) * w[..., None]
    check(lambda: summed(single.to(torch.bfloat16), w, idx >= 0))


def test_rs_1_casts_of_tokens_follow_no_default() -> None:
    x = BATCHES[0][0]

    def work() -> Any:
        kinds = [torch.float32, torch.int32, torch.float8_e8m0fnu]
        made = [cast.to_fp8(x, scales=kind, block=64) for kind in kinds] + [cast.to_int8(x)]
        return made, [cast.back(*one) for one in made]

    check(work)


@pytest.mark.parametrize(
    "fmt", [Fp8((3, 3)), Fp8((5, 4), "ue8m0"), Fp8("channel"), Int8(), Cast("float32")], ids=repr
)
def test_rs_1_quantised_weights_follow_no_default(fmt: Format) -> None:
    full = BATCHES[0][0].float()
    check(lambda: quantise(full, fmt))


@pytest.mark.parametrize("fmt", [Fp8((3, 3)), Int8()], ids=repr)
def test_rs_1_shards_that_share_blocks_follow_no_default(fmt: Format) -> None:
    plain = held(side(TRAINERS), {name: full(name, 0) for name in SHAPES})
    check(lambda: list(prepared(side(TRAINERS), {CONVERTED: fmt}, plain).values()))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-hybrid"])
def test_rs_1_logits_follow_no_default(name: str) -> None:
    def work() -> Any:
        engine = TorchEngine(Model.random(tiny(name), dtype="float32"), CacheSpec(pages=64))
        tables = shuffled(engine, 40)
        prefill(engine, text(33), tables, chunk=9)
        return [step(engine, 5 + at, 33 + at, tables) for at in range(3)]

    check(work)


def test_rs_1_a_checkpoint_follows_no_default(tmp_path: Path) -> None:
    config = tiny("tiny-llama")
    source = InitialWeights(config)
    save_checkpoint(tmp_path, config, source)

    def work() -> Any:
        found = Checkpoint(tmp_path)
        return [found[name] for name in found], [source[name] for name in source]

    check(work)


def test_rs_1_memory_of_an_engine_follows_no_default() -> None:
    def work() -> Any:
        with TransferEngine(transport="shm") as engine:
            tensor, region = engine.empty((3, 5), torch.float32)
            other = torch.zeros(4, dtype=torch.uint8, device="cpu")
            engine.register(other)
            return tensor.clone(), other, region.tensor(torch.uint8).clone()

    check(work)
