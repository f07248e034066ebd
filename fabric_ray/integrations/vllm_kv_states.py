"""States of recurrent layers, as vLLM lays them out: what of them belongs to which head.

A tensor parallel rank has the states of its heads. Of gated delta nets and Mamba 2 it is known how:
of the last inputs of the convolution each rank has its heads' queries, keys and values (or ``x``,
``B`` and ``C``) one after the other, and of the state itself its heads. So ranks may differ in
number. Other states are only moved between as many ranks (RS-1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fabric_ray.integrations import framework


@dataclass(frozen=True)
class StatePart:
    """Bytes of a state that lie side by side, head by head."""

    name: str
    """Ends whose parts have other names don't fit."""
    offset: int
    """Bytes from the start of the state."""
    heads: int
    """Of a rank; 1 for what isn't divided by heads."""
    width: int
    """Bytes of a head."""


@dataclass(frozen=True)
class State:
    """The state of a recurrent layer."""

    content: str
    """What is in it, as a rank has it."""
    nbytes: int
    parts: tuple[StatePart, ...] = ()
    """All of it, head by head; none where that isn't known."""
    is_replicated: bool = False
    """Whether each tensor parallel rank has the whole of it."""

    def divided(self, ranks: int) -> Iterator[tuple[StatePart, int]]:
        """The parts, and among how many ranks each is divided."""
        if self.parts and not self.is_replicated:
            yield from ((part, ranks) for part in self.parts)
            return
        ranks = 1 if self.is_replicated else ranks
        yield StatePart(f"{self.content}, of {ranks} ranks", 0, 1, self.nbytes), ranks


def state_of(spec: Any) -> State:
    """The state that a ``MambaSpec`` describes."""
    shapes, dtypes = spec.shapes, spec.dtypes
    each = list(zip(shapes, dtypes, strict=True))
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    return State(
        content=f"{kind}: " + ", ".join(f"{list(shape)} {dtype}" for shape, dtype in each),
        nbytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in each),
        parts=tuple(_parts(kind, shapes, dtypes)) if len(each) == 2 else (),
        is_replicated=getattr(spec, "tp_replicated", False),
    )


def _parts(kind: str, shapes: Any, dtypes: Any) -> Iterator[StatePart]:
    """The state is [heads, values, keys], and the convolution's channels are two times some heads'
    keys and one time the heads' values."""
    # In this order each rank has the channels of the convolution; those of the heads are "v".
    order = {"GDN_ATTN": "qkv", "MAMBA2": "vBC"}.get(kind)
    if order is None or len(shapes[0]) != 2 or len(shapes[1]) != 3:
        return
    utils: Any = framework("vllm.model_executor.layers.mamba.mamba_utils", "vllm")
    by_channel: bool = utils.is_conv_state_dim_first()
    channels, rows = shapes[0] if by_channel else reversed(shapes[0])
    heads, values, keys = shapes[1]
    groups, rest = divmod(channels - heads * values, 2 * keys)
    if groups <= 0 or rest:
        return
    size, at = dtypes[0].itemsize, 0
    for channel in order:
        count, width = (heads, values) if channel == "v" else (groups, keys)
        name = f"{kind} {channel} {dtypes[0]}"
        if by_channel:
            yield StatePart(f"{name}, {rows} rows", at * rows * size, count, width * rows * size)
        else:
            for row in range(rows):
                offset = (row * channels + at) * size
                yield StatePart(f"{name}, row {row} of {rows}", offset, count, width * size)
        at += count * width
    offset = channels * rows * size
    yield StatePart(f"{kind} {dtypes[1]}", offset, heads, values * keys * dtypes[1].itemsize)
