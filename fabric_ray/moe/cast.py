"""Tokens in eight or four bits, one scale for each block of a token's elements.

All is float32, each operation rounded to nearest even. For a block with largest magnitude ``amax``,
never taken to be below ``1e-4``::

    e4m3                                      int8
    scale = amax * (1 / 448)                  scale = amax / 127
    q     = x * (448 / amax)                  q     = x * (127 / amax)

With powers of two ``scale`` is the least one that isn't below ``amax * (1 / 448)``, and ``q`` is
``x / scale``. e4m3 has the bits of DeepEP's low-latency dispatch (``calculate_fp8_scales``;
DeepSeek-V3, §3.2.2), for finite tokens: its scale is a product with the rounded reciprocal. A block
with an infinity or a NaN in it comes back as NaN throughout.

In four bits (NVFP4) a block has 16 elements and an e4m3 scale, and callers give ``global_scale``::

    scale = e4m3(global_scale * (amax * (1 / 6)))
    q     = e2m1(x * (1 / (scale * (1 / global_scale))))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument

LEAST_AMAX = 1e-4
_LIMIT_FP8 = 448.0
_LIMIT_FP8_INVERSE = 1 / _LIMIT_FP8
_LIMIT_INT8 = 127.0
_LIMIT_FP4 = 6.0
FP4_BLOCK = 16
"""Elements that share a scale in four bits."""
_TILE, _LANES = (128, 4), (32, 4)
"""Rows and scales of a tile as the matrix units of sm_100 load it, and how its rows lie there."""
_MANTISSA = 23
_EXPONENTS = 0xFF
PACKED = 4
"""Exponents in one packed word."""


@dataclass(frozen=True)
class Fp8Form:
    """How :func:`to_fp8` casts tokens."""

    block: int = 128
    scales: torch.dtype = torch.float32
    powers_of_two: bool = False

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`to_fp8`."""
        return to_fp8(x, block=self.block, scales=self.scales, powers_of_two=self.powers_of_two)


def to_fp8(
    x: Tensor,
    *,
    block: int = 128,
    scales: torch.dtype = torch.float32,
    powers_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Casts tokens to e4m3.

    Args:
        x: ``[tokens, hidden]``, floating.
        block: elements that share a scale; divides hidden.
        scales: float32; float8_e8m0fnu (ue8m0, a power of two as one byte); or int32: four ue8m0
            in one word, the first in its lowest byte, as DeepEP and DeepGEMM lay them out.
        powers_of_two: round float32 scales up to powers of two; the others always are.

    Returns:
        float8_e4m3fn ``[tokens, hidden]``, and scales ``[tokens, hidden / block]``, a quarter as
        many if packed.

    Raises:
        InvalidArgument: a block that doesn't divide hidden, blocks that don't fill a packed word,
            or another dtype.
    """
    if scales not in (torch.float32, torch.float8_e8m0fnu, torch.int32):
        raise InvalidArgument(f"scales of {scales} aren't made; use float32, float8_e8m0fnu, int32")
    blocks = _blocks(x, block)
    if scales == torch.int32 and blocks.shape[1] % PACKED:
        raise InvalidArgument(
            f"{blocks.shape[1]} scales of a token don't fill words of {PACKED}; use float8_e8m0fnu"
        )
    amax = _maxima(blocks)
    scale = amax * amax.new_full((), _LIMIT_FP8_INVERSE)
    if powers_of_two or scales != torch.float32:
        exponents = _round_up(scale)
        scale = (exponents << _MANTISSA).view(torch.float32)
        values = blocks / scale[..., None]
    else:
        values = blocks * _quotient(_LIMIT_FP8, amax)[..., None]
    x8 = values.to(torch.float8_e4m3fn).view(x.shape)
    if scales == torch.float32:
        return x8, scale
    ue8m0 = exponents.to(torch.uint8)
    return x8, ue8m0.view(torch.float8_e8m0fnu if scales != torch.int32 else torch.int32)


def to_int8(x: Tensor, *, block: int = 128) -> tuple[Tensor, Tensor]:
    """Casts tokens ``[tokens, hidden]`` to int8 with float32 scales ``[tokens, hidden / block]``.

    Raises:
        InvalidArgument: a block that doesn't divide hidden, or a dtype that isn't floating.
    """
    blocks = _blocks(x, block)
    amax = _maxima(blocks)
    values = (blocks * _quotient(_LIMIT_INT8, amax)[..., None]).round_()
    # Beside an infinity there is no number: its scale makes NaN of what stands here.
    values.nan_to_num_(nan=0.0).clamp_(-_LIMIT_INT8, _LIMIT_INT8)
    # By a tensor: a GPU multiplies with the reciprocal of a number, which rounds twice.
    return values.to(torch.int8).view(x.shape), amax / amax.new_full((), _LIMIT_INT8)


def to_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Casts tokens to e2m1, two in a byte, the first in its lower half.

    Args:
        x: ``[tokens, hidden]``, floating; blocks of 16 divide hidden.
        global_scale: float32; the first element is used. ``448 * 6 / (largest magnitude)`` makes
            use of all scales.

    Returns:
        uint8 ``[tokens, hidden / 2]`` and scales float8_e4m3fn ``[tokens, hidden / 16]``. A value
        is its e2m1 times its scale, divided by ``global_scale``.

    Raises:
        InvalidArgument: blocks that don't divide hidden, or another dtype.
    """
    blocks = _blocks(x, FP4_BLOCK)
    if global_scale.dtype != torch.float32 or not global_scale.numel():
        raise InvalidArgument(
            f"the global scale is {global_scale.dtype} {tuple(global_scale.shape)}; give a float32"
        )
    whole = global_scale.reshape(-1)[0]
    # A product with 1 / 6, as in the kernels of callers; e4m3 saturates.
    scale = whole * (blocks.abs().amax(2) * (1 / _LIMIT_FP4))
    scales = scale.clamp(max=_LIMIT_FP8).to(torch.float8_e4m3fn)
    inverse = scales.float() * (1 / whole)
    factor = torch.where(inverse == 0, 0.0, 1 / inverse)
    nibbles = _e2m1(blocks * factor[..., None]).view(len(x), -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scales


def scale_tiles(
    experts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Room for scales of one byte by tiles, as grouped GEMMs of four bits load them.

    Returns:
        ``[32, 4, ceil(rows / 128), 4, ceil(width / 4), experts]``; row ``r`` and scale ``j`` of an
        expert are at ``[r % 32, r % 128 // 32, r // 128, j % 4, j // 4]``. In memory, experts are
        outermost, then tiles of 128 rows, tiles of 4 scales, and a tile's 512 bytes.
    """
    tall, wide = -(-rows // _TILE[0]), -(-width // _TILE[1])
    shape = (experts, tall, wide, *_LANES, _TILE[1])
    return torch.empty(shape, dtype=dtype, device=device).permute(3, 4, 1, 5, 2, 0)


def fill_tiles(tiles: Tensor, scales: Tensor) -> None:
    """Puts scales ``[experts, rows, width]`` into :func:`scale_tiles` for them; what fills up is
    zero."""
    by_rows = tiles.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
    _, tall, _, _, wide, _ = by_rows.shape
    _, rows, width = scales.shape
    fill = (0, wide * _TILE[1] - width, 0, tall * _TILE[0] - rows)
    by_rows.copy_(torch.nn.functional.pad(scales.view(torch.uint8), fill).view(by_rows.shape))


def _e2m1(x: Tensor) -> Tensor:
    """The codes of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, the even code of
    two that are as near; uint8."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for k, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += size >= middle if k % 2 else size > middle
    return code


def back(x: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The tokens that :func:`to_fp8` or :func:`to_int8` cast: ``x * scale`` in float32, rounded.

    Args:
        x: ``[..., hidden]``.
        scales: ``[..., hidden / block]``, or a quarter as many as int32; any strides.

    Raises:
        InvalidArgument: scales that don't divide a token into equal blocks, or of another dtype.
    """
    wide = unpack(scales) if scales.dtype == torch.int32 else scales.float()
    if scales.dtype not in (torch.float32, torch.float8_e8m0fnu, torch.int32):
        raise InvalidArgument(f"scales of {scales.dtype} aren't known")
    if wide.shape[:-1] != x.shape[:-1] or not wide.shape[-1] or x.shape[-1] % wide.shape[-1]:
        raise InvalidArgument(
            f"scales {tuple(wide.shape)} don't divide tokens {tuple(x.shape)} into equal blocks"
        )
    block = x.shape[-1] // wide.shape[-1]
    values = x.float().reshape(*wide.shape, block) * wide[..., None]
    return values.reshape(x.shape).to(dtype)


def unpack(scales: Tensor) -> Tensor:
    """The float32 scales in packed words ``[..., n]``: ``[..., 4 n]``."""
    shifts = torch.arange(0, 8 * PACKED, 8, dtype=torch.int32, device=scales.device)
    exponents = (scales[..., None] >> shifts) & _EXPONENTS
    ue8m0 = exponents.flatten(-2).to(torch.uint8)
    return ue8m0.view(torch.float8_e8m0fnu).float()


def _blocks(x: Tensor, block: int) -> Tensor:
    if x.ndim != 2 or not x.dtype.is_floating_point:
        raise InvalidArgument(
            f"tokens are {x.dtype} {tuple(x.shape)}; give floats [tokens, hidden]"
        )
    if block < 1 or x.shape[1] == 0 or x.shape[1] % block:
        raise InvalidArgument(f"blocks of {block} don't divide {x.shape[1]} elements of a token")
    return x.float().reshape(len(x), x.shape[1] // block, block)


def _maxima(blocks: Tensor) -> Tensor:
    # An infinity's scale is infinite, its block's values are 0 or NaN, and their products NaN.
    return blocks.abs().amax(2).clamp_(min=LEAST_AMAX)


def _quotient(limit: float, amax: Tensor) -> Tensor:
    # Of tensors: torch makes a product with the reciprocal of a number and a tensor.
    return amax.new_full((), limit) / amax


def _round_up(scale: Tensor) -> Tensor:
    """Biased exponents of the least powers of two that aren't below positive scales; 255, which is
    NaN, for what isn't finite."""
    bits = scale.contiguous().view(torch.int32)
    whole = (bits & ((1 << _MANTISSA) - 1)) == 0
    exponents = ((bits >> _MANTISSA) & _EXPONENTS) + torch.where(whole, 0, 1)
    return exponents.clamp_(max=_EXPONENTS).to(torch.int32)
