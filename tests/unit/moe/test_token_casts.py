"""Casts for dispatch, against loops over blocks in plain arithmetic."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe import cast
from tests.examples import examples


def tokens(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Of any magnitude, with zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g)
    x *= 2.0 ** torch.randint(-30, 30, (rows, 1), generator=g)
    x[torch.rand(x.shape, generator=g) < 0.1] = 0.0
    return x.to(dtype)


def deepep(amax: np.float32, powers: bool) -> tuple[float, float]:
    """What DeepEP's ``calculate_fp8_scales`` makes of a maximum: the scale that is sent, and what
    tokens are multiplied by."""
    inverse = amax * np.float32(1 / 448)
    if not powers:
        return float(inverse), float(np.float32(448) / amax)
    (bits,) = struct.unpack("<I", struct.pack("<f", inverse))
    exponent = (bits >> 23) - 127 + (bits & 0x7FFFFF != 0)
    return 2.0**exponent, 2.0**-exponent


shapes = st.tuples(
    st.integers(0, 2**31), st.integers(0, 5), st.sampled_from([1, 2, 4, 16, 128]), st.integers(1, 3)
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=examples(60), deadline=None)
@given(shapes, dtypes, st.booleans())
def test_fp8_is_the_block_times_its_reciprocal_scale(
    shape: tuple[int, int, int, int], dtype: torch.dtype, powers: bool
) -> None:
    seed, rows, block, count = shape
    x = tokens(seed, rows, block * count, dtype).nan_to_num(posinf=1.0, neginf=1.0)
    x8, scales = cast.to_fp8(x, block=block, powers_of_two=powers)
    assert x8.shape == x.shape
    assert scales.shape == (rows, count)
    for r in range(rows):
        for b in range(count):
            part = x[r, b * block : (b + 1) * block].float()
            amax = part.abs().max().clamp(min=1e-4)
            scale, factor = deepep(np.float32(amax.item()), powers)
            want = (part * torch.tensor(factor)).to(torch.float8_e4m3fn)
            assert scales[r, b].item() == scale
            assert torch.equal(
                x8[r, b * block : (b + 1) * block].view(torch.uint8), want.view(torch.uint8)
            )
    # e4m3 keeps four bits of a normal number; below 2^-6 of the scale steps are 2^-9.
    error = (cast.back(x8, scales, torch.float32) - x.float()).abs()
    step = scales.repeat_interleave(block, 1) * 2.0**-10
    assert (error <= x.float().abs() * 2.0**-4 * (1 + 1e-6) + step).all()


def test_scales_have_the_bits_of_deepep() -> None:
    """Random maxima, powers of two times 448, and their neighbours: where a quotient differs from a
    product with the reciprocal, and where a power of two is crossed."""
    rng = np.random.default_rng(8)
    spread = np.ldexp(1 + rng.random(99_000, dtype=np.float32), rng.integers(-13, 120, 99_000))
    edges = np.ldexp(np.float32([448, 1]), np.arange(-15, 110)[:, None]).ravel()
    beside = [np.nextafter(edges, np.float32(to)) for to in (0, np.inf)]
    amax = np.concatenate([spread, edges, *beside, 1 + np.arange(500)]).astype(np.float32)
    amax = np.maximum(amax, np.float32(1e-4))
    assert len(amax) >= 100_000
    # The block's other element is multiplied by the same factor, and seen in e4m3 only.
    x = torch.from_numpy(amax)[:, None].repeat(1, 2)
    x[:, 1] *= torch.linspace(-1, 1, len(x))
    for powers in (False, True):
        x8, scales = cast.to_fp8(x, block=2, powers_of_two=powers)
        wanted = [deepep(one, powers) for one in amax]
        scale, factor = (
            torch.tensor(each, dtype=torch.float32) for each in zip(*wanted, strict=True)
        )
        assert torch.equal(scales[:, 0], scale)
        assert torch.equal(x8.float(), (x * factor[:, None]).to(torch.float8_e4m3fn).float())
    quotients = amax / np.float32(448)
    assert (quotients != cast.to_fp8(x, block=2)[1][:, 0].numpy()).any()
    exponents = torch.tensor([127 + round(math.log2(scale)) for scale, _ in wanted])
    ue8m0 = cast.to_fp8(x, block=2, scales=torch.float8_e8m0fnu)[1]
    assert torch.equal(ue8m0.view(torch.uint8)[:, 0].long(), exponents)


@settings(max_examples=examples(40), deadline=None)
@given(shapes, dtypes)
def test_int8_is_within_half_a_step(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    seed, rows, block, count = shape
    x = tokens(seed, rows, block * count, dtype).nan_to_num(posinf=1.0, neginf=1.0)
    x8, scales = cast.to_int8(x, block=block)
    blocks = x.float().view(rows, count, block)
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    factors = torch.from_numpy(np.float32(127) / amax.numpy())
    assert torch.equal(scales, torch.from_numpy(amax.numpy() / np.float32(127)))
    want = (blocks * factors[..., None]).round().to(torch.int8).view(x.shape)
    assert torch.equal(x8, want)
    error = (cast.back(x8, scales, torch.float32) - x.float()).abs()
    assert (error <= scales.repeat_interleave(block, 1) * 0.5001).all()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 3))
def test_ue8m0_packed_or_not_says_the_same(seed: int, rows: int, words: int) -> None:
    x = tokens(seed, rows, 16 * 4 * words, torch.bfloat16)
    plain, scales = cast.to_fp8(x, block=16, powers_of_two=True)
    for dtype in (torch.float8_e8m0fnu, torch.int32):
        x8, other = cast.to_fp8(x, block=16, scales=dtype)
        assert other.dtype == dtype
        assert torch.equal(x8.view(torch.uint8), plain.view(torch.uint8))
        assert torch.equal(cast.back(x8, other), cast.back(plain, scales))
    exponents = scales.view(torch.int32) >> 23
    for k in range(4):
        assert torch.equal((other >> (8 * k)) & 0xFF, exponents[:, k::4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_block(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 2] = bad
    casts = [
        cast.to_fp8(x, block=2),
        cast.to_fp8(x, block=2, scales=torch.float8_e8m0fnu),
        cast.to_fp8(x, block=2, scales=torch.int32),
        cast.to_int8(x, block=2),
    ]
    for x8, scales in casts:
        got = cast.back(x8, scales, torch.float32)
        assert got[1, 2:4].isnan().all()
        assert got.isnan().sum() == 2


def test_strides_of_tokens_and_scales_do_not_matter() -> None:
    x = tokens(1, 6, 64, torch.float32)
    x8, scales = cast.to_fp8(x, block=16)
    of_columns = x.T.contiguous().T
    assert torch.equal(cast.to_fp8(of_columns, block=16)[1], scales)
    columns = scales.T.contiguous().T
    assert torch.equal(cast.back(x8, columns), cast.back(x8, scales))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(2, 48)
    for work, words in [
        (lambda: cast.to_fp8(x, block=32), "don't divide 48"),
        (lambda: cast.to_fp8(x, block=0), "don't divide"),
        (lambda: cast.to_fp8(x, block=16, scales=torch.int32), "fill words"),
        (lambda: cast.to_fp8(x, block=16, scales=torch.float16), "aren't made"),
        (lambda: cast.to_int8(x.int()), "give floats"),
        (lambda: cast.back(x, torch.ones(2, 5)), "equal blocks"),
        (lambda: cast.back(x, torch.ones(2, 3, dtype=torch.float16)), "aren't known"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            work()


class _Divisions(TorchDispatchMode):
    """What tensors are divided by, and whether reciprocals are made."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.by.append(args[1])
        # What ``number / tensor`` is made of.
        assert func.overloadpacket is not torch.ops.aten.reciprocal
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "call",
    [
        cast.to_fp8,
        lambda x: cast.to_fp8(x, powers_of_two=True),
        cast.to_int8,
    ],
    ids=["fp8", "powers", "int8"],
)
def test_nothing_is_divided_by_a_plain_number_which_a_gpu_multiplies_with_its_reciprocal(
    call: Callable[[torch.Tensor], Any],
) -> None:
    x = tokens(0, 3, 128, torch.float32)
    with _Divisions() as divisions:
        call(x)
    assert divisions.by
    assert all(isinstance(by, torch.Tensor) for by in divisions.by)
