"""Where parameters come from: anything that can hand out boxes of named tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from fabric_ray.models.config import ModelConfig, parameter_dtype, parameter_shapes
from fabric_ray.models.stored import check_plain

Box = tuple[slice, ...]
"""One slice with bounds and without step per dimension."""

_BLOCK_ROWS = 64


class BoxSource(Protocol):
    """Full tensors that are read in parts."""

    def box(self, name: str, box: Box) -> Tensor:
        """A part of a parameter, in memory of its own."""


class InitialWeights(Mapping[str, Tensor]):
    """Random weights that depend on the seed and the parameter's name alone.

    Every rank, however the model is sharded, sees the same ones; a tensor is made when it is asked
    for and not kept.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, std: float = 0.02) -> None:
        self._config = config
        self._shapes = parameter_shapes(config)
        self._seed = seed
        self._std = std

    def __getitem__(self, name: str) -> Tensor:
        return self.box(name, tuple(slice(0, size) for size in self._shapes[name]))

    def box(self, name: str, box: Box) -> Tensor:
        """A part of a parameter; little more of it is made than its rows."""
        rows, *rest = box
        shape = (rows.stop - rows.start, *self._shapes[name][1:])
        dtype: torch.dtype = getattr(torch, parameter_dtype(self._config, name))
        out = torch.empty(shape, dtype=dtype, device="cpu")
        if name.endswith("norm.weight"):
            out.fill_(1)
        elif name.endswith("bias"):
            out.fill_(0)
        else:
            self._fill(out, name, rows.start)
        columns: Box = (slice(None), *rest)
        return out[columns].contiguous()

    def _fill(self, out: Tensor, name: str, start: int) -> None:
        """Every block of rows has a seed of its own, so that none needs the ones before it."""
        stop = start + out.shape[0]
        for block in range(start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)):
            first = block * _BLOCK_ROWS
            text = f"{self._seed}/{name}/{block}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.empty((_BLOCK_ROWS, *out.shape[1:]), dtype=torch.float32, device="cpu")
            drawn.normal_(std=self._std, generator=generator)
            low, high = max(first, start), min(first + _BLOCK_ROWS, stop)
            out[low - start : high - start] = drawn[low - first : high - first]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@torch.no_grad()
def load_parameters(model: nn.Module, source: BoxSource) -> None:
    """Fills every parameter; of a sharded one only this rank's part is read.

    Parameters on the meta device get memory first.

    Raises:
        CheckpointError: the source's tensors aren't of plain floats, such as fp8.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        for local, box in _local_boxes(parameter):
            part = source.box(name, box)
            # A cast without its scales would be a usable wrong weight (RS-1).
            check_plain(name, part.dtype, "load_parameters")
            local.copy_(part)


def _local_boxes(parameter: Tensor) -> Iterator[tuple[Tensor, Box]]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        yield parameter, tuple(slice(0, size) for size in parameter.shape)
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    local = parameter.to_local()
    if local.numel():
        yield local, tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
