"""Which bytes move where: the one walk through memory that both ends of every pair follow."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness.cases import Case

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

SEED = 20_261_121


class Step(NamedTuple):
    """The pages one operation writes: page `sources[i]` of the sender lands on `targets[i]`."""

    sources: Indices
    targets: Indices


def ordinary_memory(count: int) -> Bytes:
    """`count` bytes of private page-aligned memory, touched."""
    room = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # As numpy and torch do for theirs.
    room.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(room, dtype=np.uint8)
    memory.fill(0)
    return memory


def pages_in(case: Case) -> int:
    """Blocks or pages of the region that the case walks through."""
    if case.operation in ("write", "pages", "window", "flight") and case.temperature == "cold":
        return max(1, case.region // case.bytes)
    return case.pages


@lru_cache(maxsize=4)
def order(count: int) -> Indices:
    """A fixed shuffle of `count` pages, the same in every process."""
    shuffled: Indices = np.random.default_rng(SEED).permutation(count).astype(np.int64)
    return shuffled


def step(case: Case, number: int) -> Step:
    """The pages of operation `number`; successive ones when cold, always the first when hot."""
    total = pages_in(case)
    first = (number % max(1, total // case.pages)) * case.pages
    sources: Indices = np.arange(first, first + case.pages, dtype=np.int64)
    if case.operation == "pages":
        return Step(sources, order(total)[sources])
    return Step(sources, sources)


def fill(memory: Bytes, seed: int = SEED) -> None:
    """Random bytes that a process with the same seed can make again."""
    generator = np.random.Generator(np.random.SFC64(seed))
    words: npt.NDArray[np.uint64] = memory[: memory.size // 8 * 8].view(np.uint64)
    chunk = 1 << 20
    for start in range(0, words.size, chunk):
        part = words[start : start + chunk]
        part[:] = generator.integers(0, 2**64, size=part.size, dtype=np.uint64)


@lru_cache(maxsize=1)
def pattern(count: int) -> Bytes:
    """What `fill` writes into `count` bytes."""
    memory: Bytes = np.empty(count, dtype=np.uint8)
    fill(memory)
    return memory


def fault(nbytes: int, steps: Sequence[Step], memory: Bytes) -> str | None:
    """None if these steps of pages of `nbytes`, from a filled source into zeroed `memory`, left
    exactly their bytes there, or a sentence. Zeroes what it has compared."""
    source = pattern(memory.size)
    blocks = memory.size // nbytes
    found = memory[: blocks * nbytes].reshape(blocks, nbytes)
    wanted = source[: blocks * nbytes].reshape(blocks, nbytes)
    for sources, targets in steps:
        for origin, place in zip(sources, targets, strict=True):
            if not np.array_equal(found[place], wanted[origin]):
                return f"bytes {origin * nbytes}.. of the source are not at {place * nbytes}"
    for _, targets in steps:
        found[targets] = 0
    stray: npt.NDArray[np.int64] = np.flatnonzero(memory.view(np.uint64))
    if stray.size:
        return f"bytes were written where none belong, the first near offset {int(stray[0]) * 8}"
    return None
