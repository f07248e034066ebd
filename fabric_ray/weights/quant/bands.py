"""Works through matrices in bands of rows that fit into scratch memory, which doesn't grow with
them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fabric_ray.weights.quant import arithmetic
from fabric_ray.weights.quant.formats import Scaled

Block = tuple[int, int]


def bands(x: Tensor, scratch: Tensor, multiple: int = 1) -> Iterator[slice]:
    """The rows of a matrix in bands, each a multiple of ``multiple`` and at least that."""
    rows, width = x.shape
    step = max(1, scratch.numel() // (multiple * width)) * multiple
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def maxima(x: Tensor, block: Block, scratch: Tensor) -> Tensor:
    """The largest magnitude in each block of a matrix of whole blocks.

    Args:
        x: ``[rows, columns]``.
        block: rows and columns of each.
        scratch: float32, elements of a band, at least those of a row.
    """
    parts = [_band_maxima(x[band], block, scratch) for band in bands(x, scratch, block[0])]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _band_maxima(x: Tensor, block: Block, scratch: Tensor) -> Tensor:
    if x.numel() <= scratch.numel():
        return arithmetic.maxima(x, block, scratch)
    # A single block, taller than a band.
    found: Tensor | None = None
    for band in bands(x, scratch):
        part = x[band]
        one = arithmetic.maxima(part, (len(part), block[1]), scratch)
        found = one if found is None else torch.maximum(found, one)
    assert found is not None, "no block is empty"
    return found


def convert(
    x: Tensor,
    out: Tensor,
    scale: Tensor,
    block: Block,
    fmt: Scaled,
    scratch: Tensor,
    *,
    measure: bool,
) -> None:
    """Quantises a matrix of whole blocks.

    Args:
        x: ``[rows, columns]``.
        out: the same, in the format's dtype; is written.
        scale: float32, of each block; is written if ``measure`` is set, and read if not.
        block: rows and columns of each.
        fmt: the format.
        scratch: as for :func:`maxima`.
        measure: whether ``x`` has all of its blocks, so that it tells their maxima.
    """
    for band in bands(x, scratch, block[0]):
        blocks = slice(band.start // block[0], band.stop // block[0])
        if measure:
            scale[blocks] = arithmetic.scales(_band_maxima(x[band], block, scratch), fmt)
        _encode(x[band], out[band], scale[blocks], fmt, scratch)


def _encode(x: Tensor, out: Tensor, scale: Tensor, fmt: Scaled, scratch: Tensor) -> None:
    """One band: several rows of blocks, or one that may be taller than the scratch memory."""
    across = scale[:, None, :, None]
    for band in bands(x, scratch) if x.numel() > scratch.numel() else (slice(None),):
        part = x[band]
        work = scratch[: part.numel()].view(part.shape)
        work.copy_(part)
        height, width = part.shape[0] // scale.shape[0], part.shape[1] // scale.shape[1]
        work.view(scale.shape[0], height, scale.shape[1], width).div_(across)
        arithmetic.rounded(work, fmt, out[band])


def cast(x: Tensor, out: Tensor, scratch: Tensor) -> bool:
    """Rounds a matrix to another float dtype; returns whether all of it is finite there."""
    for band in bands(x, scratch):
        out[band] = x[band]
        if not arithmetic.is_finite(out[band], scratch):
            return False
    return True
