"""Tensors as rows of bytes."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.tensors import check_memory, resolved

Part: TypeAlias = tuple[int, int, int, int]
"""Address, bytes from the first row to the end of the last, bytes between rows, bytes of a row."""


def check_rows(
    what: str,
    tensor: Tensor,
    *,
    width: int,
    dtype: torch.dtype,
    rows: int | None = None,
    device: torch.device,
) -> None:
    """That a tensor ``[rows, width]`` can be taken row by row.

    Raises:
        InvalidArgument: another shape or dtype, elements of a row that aren't behind one another,
            or another device.
    """
    if tensor.device != device:
        raise InvalidArgument(f"{what} lie on {tensor.device}; move them to {device}")
    check_memory(what, tensor)
    if tensor.ndim != 2 or tensor.shape[1] != width or tensor.dtype != dtype:
        raise InvalidArgument(
            f"{what} are {tensor.dtype} {tuple(tensor.shape)}; give {dtype} [rows, {width}]"
        )
    if rows is not None and tensor.shape[0] < rows:
        raise InvalidArgument(f"{what} have {tensor.shape[0]} rows, and {rows} are needed")
    if tensor.numel() == 0:
        return
    if tensor.stride(1) != 1 and width > 1:
        raise InvalidArgument(f"{what} have their elements apart; make them contiguous")
    if tensor.shape[0] > 1 and tensor.stride(0) < width:
        raise InvalidArgument(f"{what} overlap (a view by expand?); make them contiguous")


def check_statistics(tensor: Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Checks that a call can add to a tensor.

    Raises:
        InvalidArgument: it is not ``[size]`` of this dtype on this device.
    """
    if (tensor.shape, tensor.dtype, tensor.device) != ((size,), dtype, device):
        raise InvalidArgument(
            f"statistics are {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; give {dtype} "
            f"[{size}] on {device}"
        )


_HOST = torch.device("cpu")


def part(
    what: str,
    tensor: Tensor,
    *,
    width: int,
    dtype: torch.dtype,
    rows: int | None = None,
    device: torch.device = _HOST,
) -> Part:
    """A tensor ``[rows, width]`` as the native exchange takes it.

    Raises:
        InvalidArgument: as :func:`check_rows`; or it isn't on the device.
    """
    check_rows(what, tensor, width=width, dtype=dtype, rows=rows, device=device)
    n, size = tensor.shape[0], tensor.element_size()
    if n == 0 or width == 0:
        return (0, 0, width * size, width * size)
    stride = tensor.stride(0) * size if n > 1 else width * size
    return (tensor.data_ptr(), (n - 1) * stride + width * size, stride, width * size)


def indices(topk_idx: Tensor, topk: int) -> Tensor:
    """The experts of each token as contiguous 64-bit integers.

    Raises:
        InvalidArgument: not ``[tokens, topk]`` integers in host memory.
    """
    if topk_idx.device.type != "cpu":
        raise InvalidArgument(f"indices lie on {topk_idx.device}; move them to the CPU")
    if topk_idx.ndim != 2 or topk_idx.shape[1] != topk or topk_idx.dtype.is_floating_point:
        raise InvalidArgument(
            f"indices are {topk_idx.dtype} {tuple(topk_idx.shape)}; give integers [tokens, {topk}]"
        )
    return resolved("indices", topk_idx.to(torch.int64)).contiguous()
