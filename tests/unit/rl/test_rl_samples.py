"""Staleness is bounded before samples are drawn, and again before they are used."""

from __future__ import annotations

import random

import pytest
import torch

from fabric_ray.demo.rl.samples import SampleBuffer, Samples

ROWS = 3


def batch(version: int) -> Samples:
    return Samples(0, version, torch.zeros(ROWS, 5), torch.zeros(ROWS, 2), torch.zeros(ROWS))


def fill(buffer: SampleBuffer, *versions: int) -> None:
    for version in versions:
        buffer.begin()
        buffer.put(batch(version))


def test_first_in_first_out_and_counted_by_staleness() -> None:
    buffer = SampleBuffer(batches=3, staleness=2)
    fill(buffer, 1, 2, 3, 3)
    taken = buffer.take(3)
    assert taken is not None
    assert [b.version for b in taken.batches] == [1, 2, 3]
    assert taken.staleness == {0: ROWS, 1: ROWS, 2: ROWS}
    assert buffer.discarded == 0


def test_what_is_too_old_is_discarded_and_counted() -> None:
    buffer = SampleBuffer(batches=2, staleness=1)
    fill(buffer, 1, 2, 3)
    assert buffer.take(4) is None
    assert buffer.discarded == 2 * ROWS
    fill(buffer, 4)
    taken = buffer.take(4)
    assert taken is not None
    assert taken.staleness == {0: ROWS, 1: ROWS}


def test_without_staleness_nothing_begins_while_trainers_learn() -> None:
    buffer = SampleBuffer(batches=2, staleness=0)
    fill(buffer, 1, 1)
    assert not buffer.may_begin()
    assert buffer.take(1) is not None
    assert not buffer.may_begin()
    buffer.serve(2)
    assert buffer.may_begin()


def test_one_version_behind_the_next_update_is_drawn_while_trainers_learn() -> None:
    buffer = SampleBuffer(batches=2, staleness=1)
    fill(buffer, 1, 1)
    buffer.take(1)
    for _ in range(2):
        assert buffer.may_begin()
        buffer.begin()
    assert not buffer.may_begin()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_one_rollout_after_the_other_nothing_is_wasted_and_nothing_stands_still(
    staleness: int, seed: int
) -> None:
    """Whatever the speeds: batches that arrive in the order in which they began are in time."""
    draw = random.Random(seed)
    buffer = SampleBuffer(batches=3, staleness=staleness)
    version, learning, under_way = 1, False, []
    while version < 30:
        if learning and draw.random() < 0.3:
            version, learning = version + 1, False
            buffer.serve(version)
        elif not learning and (taken := buffer.take(version)) is not None:
            assert max(taken.staleness) <= staleness
            learning = True
        elif under_way and draw.random() < 0.5:
            buffer.put(batch(under_way.pop(0)))
        elif buffer.may_begin():
            buffer.begin()
            under_way.append(version)
    assert buffer.discarded == 0
