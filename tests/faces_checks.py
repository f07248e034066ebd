"""What layers and familiar faces promise, asked of ranks that :mod:`tests.gpu.moe_faces_rank`
drives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.moe import cast
from tests.gpu.moe_faces_rank import (
    EXPERTS,
    HIDDEN,
    TOPK,
    M,
    gradients,
    normal_calls,
    serve,
)
from tests.moe_ranks import ThreadComm, batch, on_ranks, unsharded
from tests.processes import Other
from tests.stands import NoKernels, Stand

LIMIT = 100.0


@contextlib.contextmanager
def ranks(
    transport: str, stands: Sequence[Callable[[], Stand]], beside: type[Other] = Other
) -> Iterator[list[Other]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(beside(serve, rank, len(stands), transport, stand))
            for rank, stand in enumerate(stands)
        ]


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


def wanted(seed: int, tokens: int = M, *, fp8: bool = False) -> torch.Tensor:
    x, idx, w = batch(seed, M, EXPERTS, TOPK, HIDDEN)
    x = cast.back(*cast.to_fp8(x)) if fp8 else x
    return unsharded(x, idx[:tokens], w)


def check_layer(others: Sequence[Other]) -> None:
    for rank, found in enumerate(run(others, "layer")):
        for seed, sums in zip((rank, 10 + rank), found, strict=True):
            assert torch.equal(sums, wanted(seed))


def check_gradients(others: Sequence[Other]) -> None:
    def on_host(comm: ThreadComm) -> Any:
        with TransferEngine(name=f"host-{comm.rank()}", transport="shm") as engine:
            return gradients(comm, engine, NoKernels())

    expected = on_ranks(2, on_host)
    for ours, theirs in zip(run(others, "gradients"), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check_deepep(others: Sequence[Other], how: str) -> None:
    for rank, found in enumerate(run(others, "deepep", how)):
        assert len(found) == (3 if how == "captured" else 1)
        for seed, sums in zip((rank, 10 + rank, 20 + rank), found, strict=False):
            assert torch.equal(sums, wanted(seed, fp8=True))


def check_masks(others: Sequence[Other]) -> None:
    assert run(others, "masks")[0] == [0, 1]


def check_normal_calls(others: Sequence[Other], per_node: int) -> None:
    def on_host(comm: ThreadComm) -> Any:
        with TransferEngine(name=f"host-{comm.rank()}", transport="shm") as engine:
            return normal_calls(comm, engine, NoKernels(), per_node)

    expected = on_ranks(2, on_host)
    for ours, theirs in zip(run(others, "normal", per_node), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is b is None) or torch.equal(a, b)


def check_pplx(others: Sequence[Other], tokens: int) -> None:
    for rank, (first, second) in enumerate(run(others, "pplx", tokens)):
        assert torch.equal(first, wanted(rank, tokens))
        assert torch.equal(second, wanted(10 + rank, max(0, tokens - 1)))
