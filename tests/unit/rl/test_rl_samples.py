"""No update learns from samples that are older than agreed, and none are lost uncounted."""

from __future__ import annotations

import random

import pytest
import torch

from fabric_ray.demo.rl.policy import SampleBuffer, Samples

ROWS = 3


def batch(version: int) -> Samples:
    return Samples(0, version, torch.zeros(ROWS, 5), torch.zeros(ROWS, 2), torch.zeros(ROWS))


def filled(*versions: int, batches: int, staleness: int) -> SampleBuffer:
    buffer = SampleBuffer(batches=batches, staleness=staleness)
    for version in versions:
        buffer.put(batch(version))
    return buffer


def test_first_in_first_out_and_counted_by_staleness() -> None:
    buffer = filled(1, 2, 3, batches=3, staleness=2)
    taken = buffer.take(3)
    assert taken is not None
    assert [b.version for b in taken.batches] == [1, 2, 3]
    assert taken.staleness == {0: ROWS, 1: ROWS, 2: ROWS}
    assert buffer.discarded == 0
    assert buffer.take(3) is None


def test_what_is_too_old_is_discarded_wherever_it_stands() -> None:
    buffer = filled(2, 1, 3, batches=3, staleness=1)
    assert buffer.take(3) is None
    assert buffer.discarded == ROWS
    buffer.put(batch(3))
    taken = buffer.take(3)
    assert taken is not None
    assert taken.staleness == {0: 2 * ROWS, 1: ROWS}


def test_a_fresh_batch_takes_the_place_of_the_oldest() -> None:
    buffer = filled(1, 1, 2, batches=2, staleness=1)
    assert buffer.discarded == ROWS
    taken = buffer.take(2)
    assert taken is not None
    assert [b.version for b in taken.batches] == [1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_at_any_speeds_the_bound_holds_and_every_sample_is_accounted_for(
    staleness: int, seed: int
) -> None:
    draw = random.Random(seed)
    buffer = SampleBuffer(batches=3, staleness=staleness)
    version, put, learned = 1, 0, 0
    for _ in range(500):
        choice = draw.random()
        if choice < 0.2:
            version += 1
        elif choice < 0.7:
            buffer.put(batch(max(1, version - draw.randrange(3))))
            put += ROWS
        elif (taken := buffer.take(version)) is not None:
            assert max(taken.staleness) <= staleness
            learned += sum(taken.staleness.values())
    assert learned > 0
    assert 0 <= put - learned - buffer.discarded <= 3 * ROWS
