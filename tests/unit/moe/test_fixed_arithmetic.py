"""Bits that depend on the numbers of a row alone, and numbers that are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.moe.arithmetic import FAST, FIXED, exp, halved

WEIGHT = torch.randn(24, 45, generator=torch.Generator().manual_seed(1))
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: FIXED.linear(x, WEIGHT.to(x.dtype)),
    "silu": FIXED.silu,
    "sigmoid": FIXED.sigmoid,
    "softmax": FIXED.softmax,
    "total": FIXED.total,
    "rms_norm": lambda x: FIXED.rms_norm(x, WEIGHT[0].to(x.dtype), 1e-6),
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", BY_ROW)
@settings(deadline=None)
@given(rows=st.integers(1, 40), seed=st.integers(0, 1000), data=st.data())
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    what: str, dtype: torch.dtype, rows: int, seed: int, data: st.DataObject
) -> None:
    x = drawn(rows, 45, seed=seed, dtype=dtype)
    some = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=50)))
    # Memory that begins elsewhere is another case for vectors.
    apart = torch.empty(len(some) * 45 + 1, dtype=dtype)[1:].view(-1, 45).copy_(x[some])
    assert torch.equal(BY_ROW[what](apart), BY_ROW[what](x)[some])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    x, w = drawn(700, 200), drawn(150, 200, seed=1)
    alone = torch.cat([FIXED.linear(row[None], w) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(FIXED.linear(x, w), alone)
        assert torch.equal(FIXED.silu(x), torch.stack([FIXED.silu(row) for row in x]))
    finally:
        torch.set_num_threads(before)


@settings(deadline=None)
@given(n=st.integers(1, 70), zeros=st.integers(0, 70), seed=st.integers(0, 1000))
def test_zeros_at_the_end_change_no_sum(n: int, zeros: int, seed: int) -> None:
    x = drawn(3, n, seed=seed)
    assert torch.equal(halved(F.pad(x, (0, zeros)), -1), halved(x, -1))


def test_exponentials_are_those_of_double_precision_within_two_units() -> None:
    x = torch.linspace(-87, 88, 200_001)
    exact = x.double().exp()
    unit = torch.nextafter(exact.float(), torch.tensor(torch.inf)).double() - exact.float().double()
    assert ((exp(x).double() - exact).abs() <= 2 * unit).all()
    assert exp(torch.tensor([0.0])).item() == 1.0
    assert exp(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("what", ["silu", "sigmoid", "softmax", "total"])
def test_both_arithmetics_compute_the_same(what: str) -> None:
    x = drawn(50, 45)
    torch.testing.assert_close(getattr(FIXED, what)(x), getattr(FAST, what)(x))
    torch.testing.assert_close(FIXED.linear(x, WEIGHT), FAST.linear(x, WEIGHT))
    norm = WEIGHT[0]
    torch.testing.assert_close(FIXED.rms_norm(x, norm, 1e-6), FAST.rms_norm(x, norm, 1e-6))


@pytest.mark.parametrize(("tokens", "positions"), [(9, 9), (1, 14), (5, 70)])
def test_attention_is_that_of_torch_and_is_the_same_token_by_token(
    tokens: int, positions: int
) -> None:
    q = drawn(tokens, 4, 16)
    k, v = drawn(positions, 2, 16, seed=1), drawn(positions, 2, 16, seed=2)
    at_once = FIXED.attend(q, k, v)
    torch.testing.assert_close(at_once, FAST.attend(q, k, v))
    for t in range(tokens):
        end = positions - tokens + t + 1
        assert torch.equal(FIXED.attend(q[t : t + 1], k[:end], v[:end])[0], at_once[t])
