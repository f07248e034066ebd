"""The arithmetic, defined once: block maxima, scales, quantised values.

For a block with largest magnitude ``amax`` and a format whose largest value is ``limit`` (448 for
e4m3fn, 127 for int8), all in float32 and rounded to nearest even::

    scale = max(amax / limit, 2^-126)
    scale = the least power of two that isn't below it      (ue8m0 only)
    q     = x / scale, rounded to the format

It is DeepSeek-V3's rule for blocks (``amax / 448``, then a division) and DeepGEMM's for ue8m0 (the
logarithm rounded up), without lower bounds for ``amax``: the least normal float32 is the bound
here, so that no scale is zero or subnormal. A block of zeros gets that scale, and zeros.
``|x / scale|`` exceeds ``limit`` by rounding at most, which the format rounds back: nothing
saturates. NaN and infinity are refused.

A maximum is exact and doesn't depend on order. So each rank that knows a block's maximum
computes the same scale and values as from the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fabric_ray.weights.quant.errors import NotFinite
from fabric_ray.weights.quant.formats import Cast, Format, Fp8, Int8, Scaled, block_of

LEAST_SCALE = 2.0**-126
_LIMITS = {Fp8: 448.0, Int8: 127.0}
_BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFF_FFFF)}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80_0000}


def magnitudes(x: Tensor, scratch: Tensor) -> Tensor:
    """``|x|`` as integers of the same order, NaN above infinity above all else.

    They lie in ``scratch``, flat and of no fewer bytes.
    """
    bits, mask = _BITS[x.element_size()]
    out = scratch.view(bits)[: x.numel()].view(x.shape)
    return torch.bitwise_and(x.view(bits), mask, out=out)


def maxima(x: Tensor, block: tuple[int, int], scratch: Tensor) -> Tensor:
    """The largest magnitude in each block of a matrix of whole blocks: float32, by row and column
    of blocks."""
    rows, columns = block
    found = magnitudes(x, scratch)
    if rows > 1:
        found = found.view(-1, rows, x.shape[1]).amax(1)
    return found.view(len(found), -1, columns).amax(2).view(x.dtype).float()


def scales(amax: Tensor, fmt: Scaled) -> Tensor:
    """float32 scales of blocks with these float32 maxima; NaN and infinity stay."""
    # By a plain number a GPU doesn't divide: it multiplies by the reciprocal, which has other bits.
    limit = amax.new_full((), _LIMITS[type(fmt)])
    scale = (amax / limit).clamp_(min=LEAST_SCALE)
    if fmt.scale == "float32":
        return scale
    finite = scale.isfinite()
    # Adding all ones below the exponent carries into it unless they were all zero.
    powers = ((scale.view(torch.int32) + 0x7F_FFFF) & ~0x7F_FFFF).view(torch.float32)
    return torch.where(finite, powers, scale)


def stored(scale: Tensor, fmt: Scaled) -> Tensor:
    """Scales as the format keeps them."""
    if fmt.scale == "ue8m0_byte":
        return (scale.view(torch.int32) >> 23).to(torch.uint8)
    return scale


def rounded(x: Tensor, fmt: Scaled, out: Tensor) -> None:
    """Writes float32 values, divided by their scales, to ``out``; ``x`` is used up."""
    out.copy_(x.round_() if isinstance(fmt, Int8) else x)


def is_finite(x: Tensor, scratch: Tensor) -> bool:
    """Whether no element is NaN or infinity; ``scratch`` as for :func:`magnitudes`."""
    return x.numel() == 0 or int(magnitudes(x, scratch).max()) < _INFINITY[x.dtype]


def quantise(full: Tensor, fmt: Format, *, name: str = "tensor") -> tuple[Tensor, Tensor | None]:
    """A whole tensor in another format: the reference for everything that works on shards.

    Args:
        full: float32, bfloat16 or float16; at least two dimensions unless the format is a cast.
        fmt: the format.
        name: for errors.

    Returns:
        Values of ``full``'s shape in ``fmt.element``, and scales ``[..., row blocks, column
        blocks]``, none for a cast.

    Raises:
        NotFinite: there is NaN or infinity, or a cast has no room for a value.
    """
    if isinstance(fmt, Cast):
        cast = full.to(getattr(torch, fmt.dtype))
        if not cast.isfinite().all():
            raise not_finite(name, fmt)
        return cast, None
    rows, columns = block_of(fmt, tuple(full.shape))[-2:]
    height, width = full.shape[-2:]
    room = torch.nn.functional.pad(full.float(), (0, -width % columns, 0, -height % rows))
    grid = (*room.shape[:-2], room.shape[-2] // rows, rows, room.shape[-1] // columns, columns)
    blocks = room.reshape(grid)
    scale = scales(blocks.abs().amax((-3, -1)), fmt)
    if not scale.isfinite().all():
        raise not_finite(name, fmt)
    limit = _LIMITS[type(fmt)]
    values = (blocks / scale[..., :, None, :, None]).clamp(-limit, limit)
    values = values.flatten(-2).flatten(-3, -2)[..., :height, :width]
    q = torch.empty(full.shape, dtype=getattr(torch, fmt.element.name), device=full.device)
    rounded(values, fmt, q)
    return q, stored(scale, fmt)


def not_finite(name: str, fmt: Format, *, rank: int | None = None) -> NotFinite:
    """The error about a tensor's values."""
    where = "" if rank is None else f" on rank {rank}"
    problem = "holds NaN or infinity"
    if isinstance(fmt, Cast):
        problem += f", or a value beyond {fmt.dtype}"
    return NotFinite(
        f"{name}{where} {problem} and can't become {fmt.element.name}; look at what trained it",
        tensor=name,
        rank=rank,
    )
