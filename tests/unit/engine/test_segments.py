"""Registering what tensors are parts of: one registration for all of them."""

from __future__ import annotations

import pickle
import sys
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fabric_ray import RegionDescriptor, TransferEngine
from fabric_ray.engine import Region, RemoteRegion
from fabric_ray.errors import EngineClosed, Stale

Pair = tuple[TransferEngine, TransferEngine]


def importing(engine: TransferEngine, region: Region) -> RemoteRegion:
    sent: RegionDescriptor = pickle.loads(pickle.dumps(region.descriptor()))
    return engine.import_region(sent)


def test_parts_share_a_registration_and_bytes_land_in_the_right_one(pair: Pair) -> None:
    a, b = pair
    whole = torch.zeros(1 << 20, dtype=torch.uint8)
    parts = whole.split(100_000)
    before = b.stats()["regions"]
    regions = [b.register(part, segment=True) for part in parts]
    assert b.stats()["regions"] == before + 1
    assert len({b.register(part).descriptor().to_bytes() for part in parts}) == len(parts)
    counter = b.counter()
    for i, region in enumerate(regions):
        assert region.nbytes == parts[i].numel()
        value = torch.full_like(parts[i], i + 1)
        a.write(a.register(value), importing(a, region), imm=counter.ref)
    counter.wait(len(regions), timeout=20)
    for i, part in enumerate(parts):
        assert (part == i + 1).all()


def test_it_lasts_as_long_as_one_part_and_ends_for_all(pair: Pair) -> None:
    a, b = pair
    whole = torch.zeros(8192, dtype=torch.uint8)
    src = a.alloc(4096)
    src.numpy()[:] = 7
    first, second = b.register(whole[:4096], segment=True), b.register(whole[4096:], segment=True)
    there = importing(a, second)
    del first
    a.write(src, there).wait(10)
    assert (whole[4096:] == 7).all()
    third = b.register(whole[:4096], segment=True)
    third.deregister()
    with pytest.raises(Stale):
        a.write(src, there).wait(10)
    with pytest.raises(Stale):
        b.write(second, there)
    # What is registered next begins anew.
    fourth = b.register(whole[:4096], segment=True)
    a.write(src, importing(a, fourth)).wait(10)
    assert (whole[:4096] == 7).all()


def test_memory_is_kept_until_the_last_part_is_gone(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine()
    array = np.zeros(4096, dtype=np.uint8)
    gone = weakref.ref(array)
    region = engine.register(array, segment=True)
    again = engine.register(array, segment=True)
    del array, region
    assert gone() is not None
    again.deregister()
    del again
    for _ in range(1000):
        if gone() is None:
            return
        time.sleep(0.01)
    pytest.fail("the memory is kept after its last region is gone")


def test_a_closed_engine_registers_no_further_part(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine()
    whole = torch.zeros(8192, dtype=torch.uint8)
    first = engine.register(whole[:4096], segment=True)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.register(whole[4096:], segment=True)
    del first


def test_registering_a_part_again_and_again_keeps_nothing_more(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine()
    array = np.zeros(8192, dtype=np.uint8)
    held = engine.register(array, segment=True)
    before = sys.getrefcount(array)
    for _ in range(1000):
        engine.register(array, segment=True)
    for _ in range(1000):
        if sys.getrefcount(array) <= before + 1:
            break
        time.sleep(0.01)
    assert sys.getrefcount(array) <= before + 1
    del held
