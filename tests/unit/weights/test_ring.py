"""Temporary memory of a push: never more than the watermark, never two uses of one byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.ring import ALIGN, ring_slices
from fabric_ray.weights.steps import Unit, units_budget

SIZES = st.lists(st.integers(0, 4096), max_size=60)


@given(SIZES, st.integers(4096, 20_000))
def test_steps_that_may_be_under_way_together_share_no_byte(
    sizes: list[int], watermark: int
) -> None:
    placed = ring_slices(sizes, watermark)
    for step, (size, ring_slice) in enumerate(zip(sizes, placed, strict=True)):
        assert 0 <= ring_slice.offset <= watermark - size
        assert ring_slice.offset % ALIGN == 0
        assert ring_slice.after < step
        for other in range(ring_slice.after + 1, step):
            first, last = placed[other].offset, placed[other].offset + sizes[other]
            apart = last <= ring_slice.offset or ring_slice.offset + size <= first
            assert apart or not size or not sizes[other]


@given(SIZES, st.integers(4096, 20_000))
def test_steps_wait_in_order(sizes: list[int], watermark: int) -> None:
    waits = [p.after for p, size in zip(ring_slices(sizes, watermark), sizes, strict=True) if size]
    assert waits == sorted(waits)


def test_a_ring_that_fits_all_steps_never_waits() -> None:
    assert [p.after for p in ring_slices([256] * 8, 2048)] == [-1] * 8


def test_a_ring_is_used_to_its_end_before_it_is_used_again() -> None:
    assert [(p.offset, p.after) for p in ring_slices([512] * 6, 1024)] == [
        (0, -1),
        (512, -1),
        (0, 0),
        (512, 1),
        (0, 2),
        (512, 3),
    ]


@pytest.mark.parametrize("watermark", [64 << 20, 128 << 20, 256 << 20])
def test_of_a_watermark_some_is_left_to_what_a_push_takes_besides(watermark: int) -> None:
    small = [Unit(str(i), i, 1 << 20) for i in range(300)]
    assert units_budget(small, watermark) == watermark - (8 << 20)
    assert units_budget([], 1024) == 1024 - 128
    assert units_budget([], watermark) < watermark


def test_a_unit_as_large_as_the_watermark_has_room() -> None:
    assert units_budget([Unit("w", 0, 4096)], 4096) == 4096
    assert units_budget([Unit("w", 0, 3840)], 4096) == 3840
    assert units_budget([Unit("w", 0, 8192)], 4096) == 4096  # and is refused by name later


def test_a_step_larger_than_the_watermark_is_refused_in_words() -> None:
    with pytest.raises(InvalidArgument, match=r"step 1 needs 2048 bytes .* raise the watermark"):
        ring_slices([256, 2048], 1024)
