"""What becomes of whole tensors: the arithmetic of a rank that holds all of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from fabric_ray.plan import DType, Tensor
from fabric_ray.weights.quant import Formats, RankQuantiser
from fabric_ray.weights.replica.sides import whole_side


class Converting:
    """Converts whole tensors as soon as they are gathered.

    Args:
        wholes: all that will come.
        formats: what becomes of which.
        rank: the trainer's, for errors.

    Raises:
        UnsupportedFormat: a tensor can't have its format.
    """

    def __init__(self, wholes: Iterable[Tensor], formats: Formats, rank: int) -> None:
        side = whole_side(wholes, rank)
        self._made = RankQuantiser(side, formats, rank).preparations if formats else {}

    def become(self, whole: Tensor) -> list[Tensor]:
        """The values, and the scales if there are any."""
        made = self._made.get(whole.name)
        if made is None:
            return [whole]
        out = [Tensor(whole.name, whole.shape, _dtype(made.values_dtype))]
        if made.scale_name is not None and made.scale_shape is not None:
            out.append(Tensor(made.scale_name, made.scale_shape, _dtype(made.scale_dtype)))
        return out

    def convert(self, name: str, tensor: torch.Tensor) -> deque[tuple[str, torch.Tensor]]:
        """What :meth:`become` describes, of one tensor.

        Raises:
            NotFinite: there is NaN or infinity in it.
        """
        made = self._made.get(name)
        if made is None or tensor.shape != made.shape:
            return deque([(name, tensor)])
        values = torch.empty(made.shape, dtype=made.values_dtype, device="cpu")
        out = deque([(name, values)])
        scales = None
        if made.scale_name is not None and made.scale_shape is not None:
            scales = torch.empty(made.scale_shape, dtype=made.scale_dtype, device="cpu")
            out.append((made.scale_name, scales))
        made.prepare(tensor, out[0][1], scales)
        return out


def described(name: str, tensor: torch.Tensor) -> Tensor:
    """A whole tensor in the words of a plan."""
    return Tensor(name, tuple(tensor.shape), _dtype(tensor.dtype))


def _dtype(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."), dtype.itemsize)
