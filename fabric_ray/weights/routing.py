"""Turns a plan's copies into requests on regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fabric_ray._native import Batch, Digest, Pages, Region, RemoteRegion
from fabric_ray.plan import Copy, Row


def outgoing(
    copies: Iterable[Copy],
    sources: Mapping[int, tuple[Region, int]],
    target: RemoteRegion,
    offsets: Sequence[int],
) -> tuple[Batch, Digest]:
    """The batch that sends ``copies`` to one target, and the digest of its bytes.

    Args:
        copies: all to the same target rank.
        sources: the region of each source container, and the container's offset in it.
        target: the target's region.
        offsets: of each target container in ``target``.
    """
    batch, digest = Batch(), Digest()
    for copy in copies:
        region, begin = sources[copy.src_container]
        base = offsets[copy.dst_container]
        for row in copy.rows():
            src, dst = _src_pages(row, begin), _dst_pages(row, base)
            if row.runs == 1:
                batch.write(
                    region,
                    target,
                    row.nbytes,
                    src_offset=begin + row.src_offset,
                    dst_offset=base + row.dst_offset,
                )
            else:
                batch.write_pages(row.nbytes, region, src, target, dst)
            digest.add(row.nbytes, region, src, dst)
    return batch, digest


def arriving(copies: Iterable[Copy], target: Region, offsets: Sequence[int]) -> Digest:
    """The receiver's digest of the bytes of ``copies``."""
    digest = Digest()
    for copy in copies:
        for row in copy.rows():
            dst = _dst_pages(row, offsets[copy.dst_container])
            digest.add(row.nbytes, target, dst, dst)
    return digest


def _src_pages(row: Row, begin: int) -> Pages:
    return Pages._range(0, row.runs, row.src_stride, begin + row.src_offset)


def _dst_pages(row: Row, base: int) -> Pages:
    return Pages._range(0, row.runs, row.dst_stride, base + row.dst_offset)
