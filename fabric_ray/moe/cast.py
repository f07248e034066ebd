"""Tokens in eight bits, one scale for each block of a token's elements.

All is float32, each operation rounded to nearest even. For a block with largest magnitude ``amax``,
never taken to be below ``1e-4``::

    e4m3                                      int8
    scale = amax * (1 / 448)                  scale = amax / 127
    q     = x * (448 / amax)                  q     = x * (127 / amax)

With powers of two ``scale`` is the least one that isn't below ``amax * (1 / 448)``, and ``q`` is
``x / scale``. e4m3 has the bits of DeepEP's low-latency dispatch (``calculate_fp8_scales``;
DeepSeek-V3, §3.2.2), for finite tokens: its scale is a product with the rounded reciprocal. A block
with an infinity or a NaN in it comes back as NaN throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument

LEAST_AMAX = 1e-4
_LIMIT_FP8 = 448.0
_LIMIT_FP8_INVERSE = 1 / _LIMIT_FP8
_LIMIT_INT8 = 127.0
_MANTISSA = 23
_BIAS = 127
_EXPONENTS = 0xFF
PACKED = 4
"""Exponents in one packed word."""


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
