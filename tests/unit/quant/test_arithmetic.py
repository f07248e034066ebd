"""The arithmetic, against definitions worked out by other means."""

from __future__ import annotations

import bisect
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray.weights.quant import Cast, Fp8, Int8, NotFinite, quantise
from tests.examples import examples

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MATRICES = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(FINITE, min_size=width, max_size=width), min_size=1, max_size=6)
)
BLOCKS = st.tuples(st.integers(1, 7), st.integers(1, 7))
LEAST = 2.0**-126


def f32(value: float) -> float:
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def decoded(code: int) -> float:
    """What the low seven bits of an e4m3fn byte mean."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


E4M3 = [decoded(code) for code in range(127)]  # 127 is NaN


def e4m3(value: float) -> int:
    """The nearest byte, the even one of two, saturating."""
    size = abs(value)
    above = min(bisect.bisect_left(E4M3, size), 126)
    below = max(above - 1, 0)
    to_below, to_above = size - E4M3[below], E4M3[above] - size
    nearest = below if to_below < to_above or (to_below == to_above and above % 2) else above
    return nearest | (0x80 if math.copysign(1, value) < 0 else 0)


def blocks(matrix, block):
    rows, columns = block
    for top in range(0, len(matrix), rows):
        for left in range(0, len(matrix[0]), columns):
            yield (
                top // rows,
                left // columns,
                [
                    (i, j)
                    for i in range(top, min(top + rows, len(matrix)))
                    for j in range(left, min(left + columns, len(matrix[0])))
                ],
            )


@settings(max_examples=examples(300), deadline=None)
@given(MATRICES, BLOCKS, st.sampled_from(["float32", "ue8m0"]))
def test_fp8_is_the_nearest_value_under_the_block_scale(matrix, block, kind) -> None:
    values, scale = quantise(torch.tensor(matrix), Fp8(block, kind))
    codes = values.view(torch.uint8).tolist()
    for row, column, places in blocks(matrix, block):
        least = max(f32(max(abs(matrix[i][j]) for i, j in places) / 448), LEAST)
        found = scale[row, column].item()
        if kind == "float32":
            assert found == least
        else:
            assert found / 2 < least <= found
            assert math.frexp(found)[0] == 0.5
        for i, j in places:
            assert codes[i][j] == e4m3(f32(matrix[i][j] / found))


@settings(max_examples=examples(100), deadline=None)
@given(MATRICES)
def test_int8_is_the_nearest_integer_under_the_row_scale(matrix) -> None:
    values, scale = quantise(torch.tensor(matrix), Int8())
    assert scale.shape == (len(matrix), 1)
    for row, codes, step in zip(matrix, values.tolist(), scale[:, 0].tolist(), strict=True):
        assert step == max(f32(max(map(abs, row)) / 127), LEAST)
        assert codes == [max(-127, min(127, round(f32(x / step)))) for x in row]


@settings(max_examples=examples(100), deadline=None)
@given(MATRICES, BLOCKS)
def test_a_scale_byte_is_the_exponent_of_the_power_of_two(matrix, block) -> None:
    full = torch.tensor(matrix)
    values, scale = quantise(full, Fp8(block, "ue8m0"))
    again, byte = quantise(full, Fp8(block, "ue8m0_byte"))
    assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))
    assert byte.dtype == torch.uint8
    assert torch.equal(torch.exp2(byte.double() - 127), scale.double())


@pytest.mark.parametrize("exponent", [-100, -1, 0, 50])
def test_a_power_of_two_is_kept_and_the_next_float_is_rounded_up(exponent) -> None:
    at = torch.tensor([[448.0]]) * 2.0**exponent
    for amax, expected in [(at, exponent), (torch.nextafter(at, at * 2), exponent + 1)]:
        assert quantise(amax, Fp8((1, 1), "ue8m0"))[1].item() == 2.0**expected


def test_the_largest_and_the_least_values_have_scales() -> None:
    most = torch.finfo(torch.float32).max
    for kind in ("float32", "ue8m0"):
        values, scale = quantise(torch.tensor([[most, 2.0**-149], [0.0, -0.0]]), Fp8((1, 1), kind))
        assert scale.isfinite().all()
        assert (scale >= LEAST).all()
        assert scale[1].tolist() == [LEAST, LEAST]
        assert 224 <= values.float()[0, 0] <= 448
        assert values.float()[1].tolist() == [0, 0]


@pytest.mark.parametrize("fmt", [Fp8(), Fp8("tensor", "ue8m0"), Int8(), Cast("float16")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(fmt, bad) -> None:
    full = torch.zeros(300, 5)
    full[200, 3] = bad
    with pytest.raises(NotFinite, match=r"the\.weight holds NaN or infinity") as raised:
        quantise(full, fmt, name="the.weight")
    assert raised.value.tensor == "the.weight"


def test_casts_round_to_even_and_refuse_what_has_no_room() -> None:
    values, scale = quantise(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]), Cast("bfloat16"))
    assert scale is None
    assert values.tolist() == [1.0, 1 + 2**-6]
    with pytest.raises(NotFinite, match="beyond float16"):
        quantise(torch.tensor([65520.0]), Cast("float16"))
    assert quantise(torch.tensor([65519.0]), Cast("float16"))[0].item() == 65504


@pytest.mark.parametrize(("per", "grid"), [("tensor", (3, 1, 1)), ("channel", (3, 8, 1))])
def test_stacked_matrices_have_scales_of_their_own(per, grid) -> None:
    full = torch.randn(3, 8, 6).bfloat16()
    values, scale = quantise(full, Fp8(per))
    assert scale.shape == grid
    for index in range(3):
        one, alone = quantise(full[index], Fp8(per))
        assert torch.equal(values[index].view(torch.uint8), one.view(torch.uint8))
        assert torch.equal(scale[index], alone)
