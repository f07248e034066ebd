"""A million pages are described by strides, in no more bytes than a few of them take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fabric_ray import TransferEngine, pages
from fabric_ray.plan import Container, DType, Leaf, Mesh, Shard, Side, Tensor, plan
from fabric_ray.plan import Plan as Routes

PAGES = 1 << 20
FEW = 16 << 10
"""Bytes that a description of all of them may take."""
WIDTH = 64
BF16 = DType.of("bfloat16")


def side(ranks: int, dim: int) -> Side:
    mesh = Mesh(tuple(range(ranks)), (ranks,))
    leaf = Leaf(Tensor("kv", (PAGES, WIDTH), BF16), mesh, (Shard(dim),))
    return Side.of(ranks, [Container("kv", BF16, leaf)])


@pytest.mark.parametrize("dim", [0, 1])
def test_a_plan_of_a_million_pages_takes_less_than_16_kb(dim: int) -> None:
    """Heads are cut in two on one side; on the other in four, or pages are."""
    routes = plan(side(2, 1), side(4, dim))
    copies = [copy for source in range(2) for copy in routes.for_source(source)]
    assert sum(copy.pages for copy in copies) >= PAGES
    assert sum(copy.nbytes for copy in copies) == PAGES * WIDTH * 2
    encoded = routes.to_bytes()
    assert len(encoded) < FEW
    assert Routes.from_bytes(encoded) == routes


def test_memory_of_a_million_pages_is_one_descriptor_whichever_pages_are_moved(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a, b = open_engine("a"), open_engine("b")
    stride = 8
    src, dst = a.alloc(PAGES * stride), b.alloc(PAGES * stride)
    src.numpy().view(np.uint64)[:] = np.arange(PAGES)
    descriptor = dst.descriptor()
    assert len(descriptor.to_bytes()) < FEW
    there, counter = a.import_region(descriptor), b.counter()
    order = np.random.default_rng(0).permutation(PAGES).astype(np.uint32)
    every = pages(range(PAGES), stride=stride)
    shuffled = pages(order, stride=stride)
    a.write_pages(stride, src, every, there, shuffled, imm=counter.ref).wait(120)
    counter.wait(PAGES, timeout=60)
    assert np.array_equal(dst.numpy().view(np.uint64)[order], np.arange(PAGES))
