"""The formats that a tensor can be given on its way, as data, and which tensors get which."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from fabric_ray.plan.types import Container, DType, Layout, Leaf, Pad, Tensor, leaves
from fabric_ray.weights.quant.errors import UnsupportedFormat

ScaleKind = Literal["float32", "ue8m0", "ue8m0_byte"]
"""How scales are kept.

``float32``: any value; what vLLM and SGLang keep of DeepSeek-V3 style block fp8.
``ue8m0``: powers of two, kept as float32: ``weight_scale_inv`` of checkpoints whose configuration
says ``scale_fmt: ue8m0`` (DeepSeek-V3.1), which engines load into the same float32 parameter.
``ue8m0_byte``: powers of two, kept as the biased exponent in a uint8 (E8M0 of the OCP microscaling
formats): where an engine's parameter is uint8.
"""

FLOATS: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")


class Cast(msgspec.Struct, frozen=True, tag="cast"):
    """Another float dtype, rounded to nearest even; no scales. Integers and booleans stay."""

    dtype: Literal["float32", "bfloat16", "float16"]

    @property
    def element(self) -> DType:
        return DType.of(self.dtype)


class Fp8(msgspec.Struct, frozen=True, tag="fp8"):
    """float8_e4m3fn with scales over the last two dimensions.

    Leading dimensions (stacked experts) are separate matrices. A value is ``q * scale``, also
    where engines call the scale ``weight_scale_inv``: it is the inverse of what was multiplied by.
    """

    per: Literal["tensor", "channel"] | tuple[int, int] = (128, 128)
    """One scale for a matrix, for a row of it, or for a block of so many rows and columns."""
    scale: ScaleKind = "float32"

    @property
    def element(self) -> DType:
        return DType.of("float8_e4m3fn")


class Int8(msgspec.Struct, frozen=True, tag="int8"):
    """int8 from -127 to 127 with one float32 scale for each row."""

    @property
    def element(self) -> DType:
        return DType.of("int8")

    @property
    def per(self) -> Literal["channel"]:
        return "channel"

    @property
    def scale(self) -> ScaleKind:
        return "float32"


Scaled = Fp8 | Int8
Format = Cast | Fp8 | Int8

Formats = Mapping[str, Format]
"""By pattern of tensor names (``*`` and ``?`` as in file names); the first that fits counts.
Tensors that none fits are left alone."""

Shape = tuple[int, ...]


def suffix(fmt: Scaled) -> str:
    """What engines append to a weight's name for its scales."""
    return "_scale_inv" if isinstance(fmt.per, tuple) else "_scale"


def scale_dtype(fmt: Scaled) -> DType:
    return DType.of("uint8" if fmt.scale == "ue8m0_byte" else "float32")


def block_of(fmt: Scaled, shape: Shape) -> Shape:
    """Elements of a block along each dimension."""
    rows, columns = shape[-2:]
    if fmt.per == "tensor":
        block = (rows, columns)
    elif fmt.per == "channel":
        block = (1, columns)
    else:
        block = fmt.per
    return (*(1 for _ in shape[:-2]), *block)


def scale_tensor(tensor: Tensor, fmt: Scaled) -> Tensor:
    """A tensor's scales: one element for each block, as many dimensions as the tensor."""
    block = block_of(fmt, tensor.shape)
    grid = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    return Tensor(tensor.name + suffix(fmt), grid, scale_dtype(fmt))


def format_of(container: Container, formats: Formats) -> Format | None:
    """The one format of all tensors in a container; ``None`` where it stays as it is.

    Raises:
        UnsupportedFormat: its tensors have several, or can't have the one they have.
    """
    patterns = tuple(formats)
    tensors = {leaf.tensor.name: leaf.tensor for leaf in leaves(container.layout)}
    found = {_first(patterns, name) for name in tensors}
    kinds = {None if pattern is None else formats[pattern] for pattern in found}
    if len(kinds) > 1:
        raise UnsupportedFormat(
            f"container `{container.name}` would hold tensors of {len(kinds)} formats; give "
            f"{', '.join(tensors)} the same",
            container=container.name,
        )
    fmt = kinds.pop()
    if isinstance(fmt, Cast) and all(_is_integer(tensor.dtype) for tensor in tensors.values()):
        return None
    if fmt is not None:
        padded = _padded(container.layout)
        for tensor in tensors.values():
            _check(container, tensor, fmt, padded)
    return fmt


@lru_cache(maxsize=1 << 17)
def _first(patterns: tuple[str, ...], name: str) -> str | None:
    return next((p for p in patterns if fits(p, name)), None)


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern of :data:`Formats` fits a tensor's name."""
    return _compiled(pattern).match(name) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def _check(container: Container, tensor: Tensor, fmt: Format, padded: bool) -> None:
    problem = None
    if tensor.dtype.name not in FLOATS:
        problem = (
            f"is {tensor.dtype.name}; only {', '.join(FLOATS)} can be converted; leave it as it is"
        )
    elif isinstance(fmt, Cast):
        return
    elif len(tensor.shape) < 2:
        problem = f"has shape {tensor.shape}, but scales are for matrices; leave it as it is"
    elif isinstance(fmt.per, tuple) and min(fmt.per) < 1:
        problem = f"would have blocks of {fmt.per}; give at least one row and column"
    elif padded:
        problem = "lies in a padded container, which can't be quantised; leave it as it is"
    if problem is not None:
        raise UnsupportedFormat(
            f"tensor `{tensor.name}` in container `{container.name}` {problem}",
            tensor=tensor.name,
            container=container.name,
        )


def _is_integer(dtype: DType) -> bool:
    return dtype.name.startswith(("int", "uint", "bool"))


def _padded(layout: Layout) -> bool:
    if isinstance(layout, Leaf):
        return False
    return isinstance(layout, Pad) or any(_padded(part) for part in layout.parts)
