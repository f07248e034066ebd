"""Layers, gradients and familiar faces on a GPU: two ranks, a process each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.moe import cast
from fabric_ray.moe.layer import MoeLayer, MoeWeights
from tests.gpu.moe_faces_rank import CONFIG, EXPERTS, HIDDEN, TOPK, M, gradients, serve
from tests.moe_ranks import ThreadComm, batch, expert, on_ranks
from tests.processes import Other

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LIMIT = 120.0


@contextlib.contextmanager
def ranks() -> Iterator[list[Other]]:
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(Other(serve, rank, 2)) for rank in range(2)]
        yield others
        run(others, "stop")


def run(others: Sequence[Other], *what: Any) -> list[Any]:
    """What each is done with; in between they gather what they have through here."""
    for other in others:
        other.say(what)
    while True:
        said = [other.hear(LIMIT) for other in others]
        if said[0][0] == "done":
            return [value for _, value in said]
        for other in others:
            other.say([value for _, value in said])


def wanted(rank: int, tokens: int = M, *, fp8: bool = False) -> torch.Tensor:
    x, idx, w = batch(rank, M, EXPERTS, TOPK, HIDDEN)
    x = cast.back(*cast.to_fp8(x)) if fp8 else x
    out = torch.zeros(x.shape)
    for t, k in (idx[:tokens] >= 0).nonzero().tolist():
        out[t] += w[t, k] * expert(int(idx[t, k]), x[t]).float()
    return out.to(torch.bfloat16)


def test_a_layer_has_the_bits_of_the_host_and_is_captured() -> None:
    whole = MoeLayer(CONFIG, MoeWeights.random(CONFIG, seed=0))
    with ranks() as others:
        for rank, found in enumerate(run(others, "layer")):
            for seed, sums in zip((rank, 10 + rank), found, strict=True):
                x = batch(seed, M, EXPERTS, TOPK, CONFIG.hidden, torch.float32)[0]
                assert torch.equal(sums, whole.forward(x))


def test_gradients_have_the_bits_of_the_host() -> None:
    def on_host(comm: ThreadComm) -> Any:
        with TransferEngine(name=f"host-{comm.rank()}", transport="shm") as engine:
            return gradients(comm, engine, "cpu")

    wanted = on_ranks(2, on_host)
    with ranks() as others:
        for ours, theirs in zip(run(others, "gradients"), wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", ["plain", "hook", "async"])
def test_deepep_calls_have_the_sums_of_one_place(how: str) -> None:
    with ranks() as others:
        for rank, sums in enumerate(run(others, "deepep", how)):
            assert torch.equal(sums, wanted(rank, fp8=True))


@pytest.mark.parametrize("tokens", [M, 5, 0])
def test_pplx_calls_read_their_bound_on_the_gpu(tokens: int) -> None:
    with ranks() as others:
        for rank, sums in enumerate(run(others, "pplx", tokens)):
            assert torch.equal(sums, wanted(rank, tokens))
