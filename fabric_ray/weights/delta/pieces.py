"""Pieces: the parts of a plan's copies that are sent as changes, or whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from fabric_ray.plan import Copy, DType, LocalContainer, Plan

SHARE = 4
"""The changes of a piece take at most 1/SHARE of its bytes; otherwise it is sent whole."""
# Bytes of a piece: large enough for few requests, small enough to overlap comparing and sending.
_PIECE = 16 << 20
_ALIGN = 64


def threads() -> int:
    """How many threads compare or apply at a time."""
    return min(8, len(os.sched_getaffinity(0)))


def itemsizes(containers: Iterable[LocalContainer]) -> dict[int, int]:
    """Bytes of an element, by container; 1 for a dtype of unknown size."""
    out = {}
    for container in containers:
        try:
            out[container.index] = DType.of(container.dtype).itemsize
        except ValueError:
            out[container.index] = 1
    return out


def pieces(copies: Iterable[Copy]) -> list[Copy]:
    """The pieces of all copies between two ranks, in the order that both ends know."""
    cut = [piece for copy in copies for piece in _cut(copy)]
    return sorted(cut, key=lambda piece: (piece.dst_container, piece.dst_offset))


class InboxShare(NamedTuple):
    """One trainer's part of a rollout's inbox, in bytes."""

    offset: int
    nbytes: int


def inbox_shares(plan: Plan) -> dict[int, dict[int, InboxShare]]:
    """The parts of all inboxes, by plan rank and trainer."""
    out: dict[int, dict[int, InboxShare]] = {}
    ends: dict[int, int] = {}
    for link in plan.links():
        begin = ends.get(link.dst, 0)
        nbytes = -(-link.nbytes // SHARE // _ALIGN) * _ALIGN
        out.setdefault(link.dst, {})[link.src] = InboxShare(begin, nbytes)
        ends[link.dst] = begin + nbytes
    return out


def _cut(copy: Copy) -> Iterator[Copy]:
    """Parts of a copy of at most about 16 MiB, along its outermost loop."""
    if copy.nbytes <= _PIECE:
        yield copy
    elif not copy.loops:
        for at in range(0, copy.run, _PIECE):
            yield _part(copy, at, at, min(_PIECE, copy.run - at), ())
    else:
        outer, *inner = copy.loops
        each = copy.nbytes // outer.count
        step = max(1, _PIECE // each)
        for first in range(0, outer.count, step):
            count = min(step, outer.count - first)
            loop = msgspec.structs.replace(outer, count=count)
            loops = (loop, *inner) if count > 1 else tuple(inner)
            src, dst = first * outer.src_stride, first * outer.dst_stride
            part = _part(copy, src, dst, copy.run, loops)
            yield from (part,) if step > 1 else _cut(part)


def _part(copy: Copy, src: int, dst: int, run: int, loops: tuple[object, ...]) -> Copy:
    return msgspec.structs.replace(
        copy,
        src_offset=copy.src_offset + src,
        dst_offset=copy.dst_offset + dst,
        run=run,
        loops=loops,
    )
