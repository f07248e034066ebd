"""What GPU checks run in each rank, with kernels on the processor: threads in place of processes.

A graph there refuses what a GPU's would refuse (:mod:`tests.host_graph`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import faces_checks
from tests.exchange_cases import CASES, Case
from tests.exchange_checks import check_case, ranks
from tests.host_kernels import Host
from tests.processes import Other, Thread
from tests.stands import NoKernels, OnProcessor


@pytest.fixture(scope="module")
def others(host: Host) -> Iterator[list[Other]]:
    with ranks("shm", [lambda: OnProcessor(host)] * 2, Thread) as both:
        yield both


#: What the others have: formats of sums in test_moe_on_host, casts in test_token_casts, few tokens
#: and rows that come by turns in test_direct_stores.
IN_THE_GATE = {
    "fp8 packed ue8m0", "by the engine alone",
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in IN_THE_GATE else [pytest.mark.long])
        for c in CASES
    ],
)
def test_each_case_has_the_bits_of_one_place_and_is_captured(
    others: list[Other], case: Case
) -> None:
    check_case(others, case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES[::6], ids=lambda case: case.name)
def test_ranks_with_kernels_and_without_are_one_exchange(host: Host, case: Case) -> None:
    with ranks("tcp", [lambda: OnProcessor(host), NoKernels], Thread) as both:
        check_case(both, case, captured=False)


@pytest.fixture
def faces(host: Host) -> Iterator[list[Other]]:
    with faces_checks.ranks("shm", [lambda: OnProcessor(host)] * 2, Thread) as both:
        yield both


def test_a_layer_has_the_bits_of_one_place_and_is_captured(faces: list[Other]) -> None:
    faces_checks.check_layer(faces)


def test_gradients_have_the_bits_of_ranks_without_kernels(faces: list[Other]) -> None:
    faces_checks.check_gradients(faces)


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.long), "hook", "captured"])
def test_deepep_calls_have_the_sums_of_one_place(faces: list[Other], how: str) -> None:
    faces_checks.check_deepep(faces, how)


def test_masks_tell_of_a_rank_that_was_lost_in_the_calls_before(faces: list[Other]) -> None:
    faces_checks.check_masks(faces)


@pytest.mark.parametrize("tokens", [faces_checks.M, 0])
def test_pplx_calls_read_their_bound_where_it_lies(faces: list[Other], tokens: int) -> None:
    faces_checks.check_pplx(faces, tokens)


def test_deepep_normal_calls_have_the_bits_of_ranks_without_kernels(faces: list[Other]) -> None:
    # Over nodes kernels go on beside the host: not where a launch returns when it is over.
    faces_checks.check_normal_calls(faces, 2)
