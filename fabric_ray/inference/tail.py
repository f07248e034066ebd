"""The tail of a prefill as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.protocols import Tail, TailField, TailLayout
from fabric_ray.inference.spec import ITEMSIZE

_ALIGNMENT = 8


def tail_layout(fields: Sequence[tuple[str, int]], dtype: str) -> TailLayout:
    """Vectors of ``dtype``, named and so many elements long, one behind the other."""
    out, offset = [], 0
    for name, elements in fields:
        out.append(TailField(name, elements, dtype, offset))
        offset += math.ceil(elements * ITEMSIZE[dtype] / _ALIGNMENT) * _ALIGNMENT
    return TailLayout(tuple(out), offset)


def write_tail(layout: TailLayout, tail: Tail, into: Tensor) -> None:
    """Lays a tail out in uint8 memory.

    Raises:
        InferenceError: the memory is too short.
    """
    memory = _memory(layout, into)
    for field in layout.fields:
        vector: Tensor = getattr(tail, field.name)
        raw = vector.detach().to(getattr(torch, field.dtype)).contiguous().view(torch.uint8)
        memory[field.offset : field.offset + raw.numel()] = raw


def read_tail(layout: TailLayout, source: Tensor) -> Tail:
    """A copy of the tail that lies in uint8 memory.

    Raises:
        InferenceError: the memory is too short.
    """
    memory = _memory(layout, source)
    vectors = {}
    for field in layout.fields:
        nbytes = field.elements * ITEMSIZE[field.dtype]
        raw = memory[field.offset : field.offset + nbytes].clone()
        vectors[field.name] = raw.view(getattr(torch, field.dtype))
    return Tail(**vectors)


def _memory(layout: TailLayout, memory: Tensor) -> Tensor:
    if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < layout.nbytes:
        raise InferenceError(
            f"a tail takes {layout.nbytes} bytes and was given {memory.dtype} of shape "
            f"{list(memory.shape)}; give uint8, at least that long"
        )
    return memory
