"""Layers, gradients and familiar faces on a GPU: two ranks, a process each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fabric_ray.moe.comm import GroupComm
from tests import faces_checks
from tests.faces_checks import M
from tests.processes import Other
from tests.stands import OnGpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Ranks:
    """The same two for all tests, until one fails."""

    def __init__(self) -> None:
        self._context = faces_checks.ranks("cuda_ipc", [OnGpu, OnGpu])
        self._others: list[Other] | None = None

    def get(self) -> list[Other]:
        if self._others is None:
            self._context = faces_checks.ranks("cuda_ipc", [OnGpu, OnGpu])
            self._others = self._context.__enter__()
        return self._others

    def close(self) -> None:
        if self._others is not None:
            self._others = None
            self._context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


@pytest.fixture
def others(pair: Ranks, request: pytest.FixtureRequest) -> Iterator[list[Other]]:
    failed = request.session.testsfailed
    yield pair.get()
    if request.session.testsfailed > failed:
        pair.close()


def test_a_layer_has_the_bits_of_the_host_and_is_captured(others: list[Other]) -> None:
    faces_checks.check_layer(others)


def test_gradients_have_the_bits_of_the_host(others: list[Other]) -> None:
    faces_checks.check_gradients(others)


@pytest.mark.parametrize("how", ["plain", "hook", "async", "captured"])
def test_deepep_calls_have_the_sums_of_one_place(others: list[Other], how: str) -> None:
    faces_checks.check_deepep(others, how)


def test_masks_tell_of_a_rank_that_was_lost_in_the_calls_before(others: list[Other]) -> None:
    faces_checks.check_masks(others)


@pytest.mark.parametrize("per_node", [2, 1])
def test_deepep_normal_calls_have_the_bits_of_the_host(others: list[Other], per_node: int) -> None:
    faces_checks.check_normal_calls(others, per_node)


def test_a_group_of_nccl_alone_is_enough(tmp_path: Path) -> None:
    store = tmp_path / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        comm = GroupComm(dist.group.WORLD)
        assert comm.all_gather(b"here") == [b"here"]
        assert comm.all_gather(b"") == [b""]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("tokens", [M, 5, 1, 0])
def test_pplx_calls_read_their_bound_on_the_gpu(others: list[Other], tokens: int) -> None:
    faces_checks.check_pplx(others, tokens)
