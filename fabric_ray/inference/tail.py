"""The tail of a prefill as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.protocols import Tail, TailLayout


def write_tail(layout: TailLayout, tail: Tail, into: Tensor) -> None:
    """Lays a tail out in uint8 memory.

    Raises:
        InferenceError: the memory is too short.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    for vector, raw in zip((tail.logits, tail.hidden), _vectors(layout, into), strict=True):
        raw.copy_(vector.detach().to(dtype).contiguous().view(torch.uint8))


def read_tail(layout: TailLayout, source: Tensor) -> Tail:
    """A copy of the tail that lies in uint8 memory.

    Raises:
        InferenceError: the memory is too short.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return Tail(*(raw.clone().view(dtype) for raw in _vectors(layout, source)))


def _vectors(layout: TailLayout, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of the logits and of the hidden state."""
    if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < layout.nbytes:
        raise InferenceError(
            f"a tail takes {layout.nbytes} bytes and was given {memory.dtype} of shape "
            f"{list(memory.shape)}; give uint8, at least that long"
        )
    size = layout.itemsize
    hidden = memory[layout.hidden_at :]
    return memory[: layout.vocab * size], hidden[: layout.hidden * size]
