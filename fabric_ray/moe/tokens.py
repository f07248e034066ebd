"""What a token is made of on its way to experts, and what comes of it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe import rows
from fabric_ray.moe.cast import Fp8Form

SUMS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What answers and sums may be."""


@dataclass(frozen=True)
class RowPart:
    """What goes with a token beside its activations: scales, weights, indices."""

    name: str
    width: int
    """Elements for each token."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Dispatched:
    """The tokens for this rank's experts, in the order of experts."""

    x: Tensor
    """``[rows, hidden]``, those that fill up included; what is in those is not defined."""
    parts: dict[str, Tensor]
    """By name, ``[rows, width]``."""
    counts: Tensor
    """Rows of each local expert, int64; where the tokens lie, or on the host where that knows."""
    starts: Tensor
    """The first row of each local expert, int64; likewise."""

    @classmethod
    def on_host(
        cls, tensors: dict[str, Tensor], total: int, counts: Sequence[int], starts: Sequence[int]
    ) -> Dispatched:
        """What came, in ``tensors`` with room for ``total`` rows or more, where the host knows how
        many there are of each expert."""
        parts = dict(tensors)
        return cls(
            x=parts.pop("x")[:total],
            parts=parts,
            counts=torch.tensor(counts, dtype=torch.int64, device="cpu"),
            starts=torch.tensor(starts, dtype=torch.int64, device="cpu"),
        )

    def of(self, expert: int) -> slice:
        """The rows of a local expert; waits for a device."""
        start = int(self.starts[expert])
        return slice(start, start + int(self.counts[expert]))

    def experts(self) -> Tensor:
        """The local expert of each row, int64 ``[rows]``, and -1 for padding rows; on the tokens'
        device, without waiting for it."""
        row = torch.arange(len(self.x), dtype=torch.int64, device=self.x.device)
        starts, counts = self.starts.to(row.device), self.counts.to(row.device)
        expert = torch.searchsorted(starts, row, right=True) - 1
        return torch.where(row - starts[expert] < counts[expert], expert, -1)

    def copy_part(self, name: str, into: Tensor) -> None:
        """Copies a part's rows into ``[rows, width]`` or ``[local experts, rows of each, width]``
        of any dtype and strides, where padding rows keep what they have; on the tokens' device,
        without waiting for it."""
        row = into.shape[-1] * into.element_size()
        # Flat first: a column of one element may have any stride.
        kept = into.contiguous().flatten().view(torch.uint8).view(*into.shape[:-1], row)
        came = self.parts[name].view(torch.uint8).view(kept.shape)
        there = (self.experts() >= 0).view(into.shape[:-1])
        into.copy_(torch.where(there[..., None], came, kept).view(into.dtype))


@dataclass(frozen=True)
class Outgoing:
    """Tokens to be dispatched."""

    x: Tensor
    """``[tokens, token_width]``; bfloat16 ``[tokens, hidden]`` with ``cast``."""
    indices: Tensor
    """``[tokens, topk]``: the experts of each; -1 for none."""
    parts: Mapping[str, Tensor]
    """By name, ``[tokens, width]``; all but ``scales`` with ``cast``."""
    cast: Fp8Form | None = None
    """``x`` is cast on its way, and its scales are the part ``scales``."""
    kept: Tensor | None = None
    """int64 ``[tokens, topk]``, takes the indices."""


@dataclass(frozen=True)
class Room:
    """Where a device puts the tokens that come to it, each expert's rows in a part of their own."""

    tensors: Mapping[str, Tensor]
    """Parts by name, ``x`` among them: ``[rows, width]``; or ``[local experts, rows of each,
    width]`` with each element's rows behind one another, of one or four bytes. Other parts get
    tensors of their own."""
    counts: Tensor
    """int32 ``[local experts]``, takes the rows of each."""
    layout: Tensor
    """int64 ``[local experts, ranks]``, takes the rows of each source that came and, in the upper
    half, the first of them among the expert's; 0 for none."""


@dataclass(frozen=True)
class RankLoss:
    """A rank that was lost."""

    rank: int
    stage: str
    """The phase of the exchange in which it was lost."""
    cause: str


def check_sizes(
    parts: Sequence[RowPart], dtype: torch.dtype, answer_dtype: torch.dtype, **sizes: int
) -> None:
    """Checks that an exchange can carry such tokens and answers, and that each size is at least 1.

    Raises:
        InvalidArgument: a part, a dtype or a size is invalid.
    """
    for each in (dtype, answer_dtype, *(part.dtype for part in parts)):
        if not isinstance(each, torch.dtype):
            raise InvalidArgument(f"{each!r} is no dtype; give one of torch's: torch.bfloat16")
    if answer_dtype not in SUMS:
        raise InvalidArgument(f"answers of {answer_dtype} can't be summed; use one of {[*SUMS]}")
    names = [p.name for p in parts]
    if len({*names, "x"}) != len(names) + 1:
        raise InvalidArgument(f"parts {names} need names of their own, other than x")
    for name, value in sizes.items():
        if not 0 < value < 1 << 31:
            raise InvalidArgument(f"{name} is {value}; give at least 1")


_HOST = torch.device("cpu")


def given(
    parts: Sequence[RowPart],
    tensors: Mapping[str, Tensor],
    tokens: int,
    device: torch.device = _HOST,
) -> list[rows.Part]:
    """The parts of ``tokens`` tokens as the native exchange takes them.

    Raises:
        InvalidArgument: others are given, or they don't fit.
    """
    if {*tensors} != {p.name for p in parts}:
        wanted = [p.name for p in parts]
        raise InvalidArgument(f"a token is made of {wanted}; {[*tensors]} was given")
    found = []
    for p in parts:
        tensor = tensors[p.name]
        if tensor.shape[:1] != (tokens,):
            shape = tuple(tensor.shape)
            raise InvalidArgument(f"{p.name} of {shape} for {tokens} tokens; give one row for each")
        found.append(rows.part(p.name, tensor, width=p.width, dtype=p.dtype, device=device))
    return found


def room_by_columns(part: RowPart, tensor: Tensor, total: int, device: torch.device) -> Tensor:
    """``[local experts, rows of each, width]`` for ``total`` rows.

    Raises:
        InvalidArgument: it isn't.
    """
    shape = (tensor.shape[0] * tensor.shape[1], tensor.shape[2])
    if (tensor.dtype, tensor.device, shape) != (part.dtype, device, (total, part.width)):
        raise InvalidArgument(
            f"{part.name} are {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; give "
            f"{part.dtype} of {total} rows of {part.width} on {device}"
        )
    return tensor


def room(
    parts: Sequence[RowPart], total: int, x: Tensor | None, device: torch.device = _HOST
) -> tuple[dict[str, Tensor], list[rows.Part]]:
    """Tensors for ``total`` rows by part, ``x`` in place of a new one, and the same as the native
    exchange takes them.

    Raises:
        InvalidArgument: ``x`` is too small, or no such tensor.
    """
    tensors, found = {}, []
    for p in parts:
        tensor = x if p.name == "x" else None
        if tensor is None:
            tensor = torch.empty(total, p.width, dtype=p.dtype, device=device)
        tensors[p.name] = tensor
        found.append(
            rows.part(p.name, tensor, width=p.width, dtype=p.dtype, rows=total, device=device)
        )
    return tensors, found


def check_order(multiple: int, stride: int | None) -> None:
    """
    Raises:
        InvalidArgument: no rows can be laid out so.
    """
    for name, value in (("multiple", multiple), ("stride", stride)):
        if value is not None and not 0 < value < 1 << 31:
            raise InvalidArgument(f"{name} is {value}; give at least 1")


def check_wanted(
    wanted: Tensor, shape: tuple[int, int], device: torch.device, *, experts: bool = False
) -> None:
    """
    Args:
        experts: it may be int64, the experts whose answers are.

    Raises:
        InvalidArgument: it doesn't say of each answer whether it is.
    """
    known = wanted.dtype == torch.bool or (experts and wanted.dtype == torch.int64)
    if not known or (wanted.shape, wanted.device) != (shape, device):
        raise InvalidArgument(
            f"wanted is {wanted.dtype} {tuple(wanted.shape)} on {wanted.device}; give bool "
            f"{shape} on {device}"
        )


def summed(answers: Tensor, weights: Tensor | None, wanted: Tensor) -> Tensor:
    """Sums of those that are wanted of ``[tokens, topk, hidden]``, as the exchange makes them:
    float32, one expert after the other."""
    total = torch.zeros(len(answers), answers.shape[2], dtype=torch.float32, device=answers.device)
    for k in range(answers.shape[1]):
        answer = answers[:, k].float().masked_fill_(~wanted[:, k, None], 0)
        if weights is not None:
            answer *= weights[: len(answers), k, None].masked_fill(~wanted[:, k, None], 0)
        total += answer
    return total


def sums(
    out: Tensor | None,
    dtype: torch.dtype | None,
    default: torch.dtype,
    shape: tuple[int, int],
    device: torch.device = _HOST,
) -> tuple[Tensor, rows.Part]:
    """Where sums ``[tokens, hidden]`` go: ``out``, or a new tensor of ``dtype``, or of the default.

    Raises:
        InvalidArgument: they don't go there.
    """
    if out is None:
        out = torch.empty(shape, dtype=dtype or default, device=device)
    elif dtype not in (None, out.dtype):
        raise InvalidArgument(f"sums of {dtype} don't go into {out.dtype}; leave dtype out")
    if out.dtype not in SUMS:
        raise InvalidArgument(f"sums of {out.dtype} can't be made; use one of {[*SUMS]}")
    width, count = shape[1], shape[0]
    return out, rows.part("sums", out, width=width, dtype=out.dtype, rows=count, device=device)
