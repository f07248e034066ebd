"""Conversion of one rank's tensors to other dtypes during a push."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer, Side
from fabric_ray.weights.local import describe_tensor
from fabric_ray.weights.quant import EdgeExchange, Formats, Invitation, Preparation, RankQuantiser
from fabric_ray.weights.report import Span
from fabric_ray.weights.steps import Unit

if TYPE_CHECKING:
    import torch


class Recipe(msgspec.Struct, frozen=True):
    """The formats to which trainers convert their tensors."""

    side: Side
    """The trainers' side, before conversion."""
    formats: Formats


class Conversion:
    """Converts one rank's shards, with block maxima from the other ranks."""

    def __init__(self, session: str, recipe: Recipe, rank: int, engine: TransferEngine) -> None:
        self.session = session
        """The session of the recipe."""
        self._rank = rank
        self._dtypes = {c.name: c.dtype.name for c in recipe.side.containers}
        self._quantiser = RankQuantiser(recipe.side, recipe.formats, rank)
        self._exchange = EdgeExchange(engine, self._quantiser.edges)
        self._maxima: torch.Tensor | None = None

    @property
    def invitation(self) -> Invitation:
        return self._exchange.invitation

    def connect(self, invitations: Mapping[int, Invitation]) -> None:
        self._exchange.connect(invitations)

    @property
    def names(self) -> frozenset[str]:
        """Containers that are converted."""
        return frozenset(self._quantiser.preparations)

    @property
    def made(self) -> frozenset[str]:
        """Containers that are converted, and their scales."""
        scales = (p.scale_name for p in self._quantiser.preparations.values())
        return self.names | {name for name in scales if name is not None}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compares tensors with the trainers' side.

        Raises:
            InvalidArgument: a tensor differs; the error names the first.
        """
        for name, preparation in self._quantiser.preparations.items():
            tensor = tensors.get(name)
            found = "missing" if tensor is None else describe_tensor(tensor.dtype, tensor.shape)
            wanted = describe_tensor(self._dtypes[name], preparation.shape)
            if found != wanted:
                raise InvalidArgument(
                    f"`{name}` of rank {self._rank} differs from the side: got {found}, expected "
                    f"{wanted}; give the side of this model and these parallel sizes"
                )

    def units(self, containers: Iterable[LocalContainer]) -> list[Unit]:
        """The units to prepare.

        Args:
            containers: this rank's, of the converted side. Containers of the same name may have
                other strides on other ranks.
        """
        index = {container.name: container.index for container in containers}
        return [_unit(p, index) for p in self._quantiser.preparations.values()]

    def begin(self, version: int, local: Callable[[str], torch.Tensor], timeout: float) -> Span:
        """Exchanges the maxima of blocks that several ranks share.

        Args:
            local: this rank's shard by name.
            timeout: seconds.

        Raises:
            ExchangeFailed: another rank is lost, late or at another version; the error names it.
        """
        start = time.time()
        self._maxima = self._quantiser.partial_maxima(_Shards(local))
        self._exchange.run(version, self._maxima, timeout=max(timeout, 1e-3))
        return Span(f"trainer {self._rank}", "exchange", start, time.time())

    def prepare(self, unit: Unit, local: torch.Tensor, memory: torch.Tensor) -> None:
        """Converts one container.

        Args:
            local: this rank's shard.
            memory: uint8; ``unit.nbytes`` of them are written.

        Raises:
            NotFinite: the container or a shared block has NaN or infinity.
        """
        preparation = self._quantiser.preparations[unit.name]
        values = memory[: unit.values_nbytes].view(preparation.values_dtype)
        scales = None
        if preparation.scale_shape is not None:
            flat = memory[unit.scales_at : unit.scales_at + unit.scales_nbytes]
            scales = flat.view(preparation.scale_dtype).view(preparation.scale_shape)
        preparation.prepare(local, values.view(preparation.shape), scales, self._maxima)

    def give_up(self) -> None:
        """Tells the other ranks that this rank skips the next exchange."""
        self._exchange.give_up()

    def close(self) -> None:
        self._exchange.close()


class _Shards(dict[str, "torch.Tensor"]):
    """Shards by name, computed at each lookup and not cached."""

    def __init__(self, local: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._local = local

    def __missing__(self, name: str) -> torch.Tensor:
        return self._local(name)


def _unit(preparation: Preparation, index: Mapping[str, int]) -> Unit:
    values = math.prod(preparation.shape) * preparation.values_dtype.itemsize
    scale_name = preparation.scale_name
    return Unit(
        preparation.name,
        index[preparation.name],
        values,
        None if scale_name is None else index[scale_name],
        preparation.nbytes - values,
    )
