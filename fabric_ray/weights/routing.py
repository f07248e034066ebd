"""From a plan's copies to requests: the only place where layouts meet regions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fabric_ray._native import Batch, Digest, Pages, Region, RemoteRegion
from fabric_ray.plan import Copy


class Run(NamedTuple):
    """Equally long pieces in a row: page ``i`` lies at ``offset + i * stride`` on either side."""

    nbytes: int
    pages: int
    src_offset: int
    src_stride: int
    dst_offset: int
    dst_stride: int

    def src_pages(self) -> Pages:
        return Pages._range(0, self.pages, self.src_stride, self.src_offset)

    def dst_pages(self, base: int = 0) -> Pages:
        return Pages._range(0, self.pages, self.dst_stride, base + self.dst_offset)


def runs(copy: Copy) -> Iterator[Run]:
    """A copy as runs: its longest loop becomes pages, the others are unrolled."""
    if not copy.loops:
        yield Run(copy.run, 1, copy.src_offset, 0, copy.dst_offset, 0)
        return
    pages = max(copy.loops, key=lambda loop: loop.count)
    others = [loop for loop in copy.loops if loop is not pages]
    for indices in itertools.product(*(range(loop.count) for loop in others)):
        src = sum(i * loop.src_stride for i, loop in zip(indices, others, strict=True))
        dst = sum(i * loop.dst_stride for i, loop in zip(indices, others, strict=True))
        yield Run(
            copy.run,
            pages.count,
            copy.src_offset + src,
            pages.src_stride,
            copy.dst_offset + dst,
            pages.dst_stride,
        )


def outgoing(
    copies: Iterable[Copy],
    sources: Mapping[int, Region],
    target: RemoteRegion,
    offsets: Sequence[int],
) -> tuple[Batch, Digest]:
    """What sends ``copies`` to one target, and the digest of what is sent.

    Args:
        copies: all to the same target rank.
        sources: the region of each source container.
        target: the target's region.
        offsets: where each target container begins in it.
    """
    batch, digest = Batch(), Digest()
    for copy in copies:
        region, base = sources[copy.src_container], offsets[copy.dst_container]
        for run in runs(copy):
            if run.pages == 1:
                batch.write(
                    region,
                    target,
                    run.nbytes,
                    src_offset=run.src_offset,
                    dst_offset=base + run.dst_offset,
                )
            else:
                batch.write_pages(run.nbytes, region, run.src_pages(), target, run.dst_pages(base))
            digest.add(run.nbytes, region, run.src_pages(), run.dst_pages(base))
    return batch, digest


def arriving(copies: Iterable[Copy], target: Region, offsets: Sequence[int]) -> Digest:
    """The digest, at the receiver, of what ``copies`` bring."""
    digest = Digest()
    for copy in copies:
        for run in runs(copy):
            places = run.dst_pages(offsets[copy.dst_container])
            digest.add(run.nbytes, target, places, places)
    return digest
