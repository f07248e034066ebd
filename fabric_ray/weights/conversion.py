"""How one rank's tensors change their dtype on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer, Side
from fabric_ray.weights.local import told
from fabric_ray.weights.quant import EdgeExchange, Formats, Invitation, Preparation, RankQuantiser
from fabric_ray.weights.report import Span
from fabric_ray.weights.steps import Unit

if TYPE_CHECKING:
    import torch


class Recipe(msgspec.Struct, frozen=True):
    """What becomes of what trainers hold."""

    side: Side
    """As they hold it."""
    formats: Formats


class Conversion:
    """One rank's part in it: its shards, and the maxima that it needs from others."""

    def __init__(self, session: str, recipe: Recipe, rank: int, engine: TransferEngine) -> None:
        self.session = session
        """Whose recipe it is."""
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
        """Containers that change."""
        return frozenset(self._quantiser.preparations)

    @property
    def made(self) -> frozenset[str]:
        """Those, and their scales."""
        scales = (p.scale_name for p in self._quantiser.preparations.values())
        return self.names | {name for name in scales if name is not None}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """That tensors are what they are made from by the side.

        Raises:
            InvalidArgument: the first that isn't.
        """
        for name, preparation in self._quantiser.preparations.items():
            tensor = tensors.get(name)
            found = "missing" if tensor is None else told(tensor.dtype, tensor.shape)
            wanted = told(self._dtypes[name], preparation.shape)
            if found != wanted:
                raise InvalidArgument(
                    f"`{name}` of rank {self._rank} is {found} here and {wanted} by the side; give "
                    "the side of this model and these parallel sizes"
                )

    def units(self, containers: Iterable[LocalContainer]) -> list[Unit]:
        """What is made ready.

        Args:
            containers: this rank's, of the converted side. Other ranks may have others of the same
                name, with other strides.
        """
        index = {container.name: container.index for container in containers}
        return [_unit(p, index) for p in self._quantiser.preparations.values()]

    def begin(self, version: int, local: Callable[[str], torch.Tensor], timeout: float) -> Span:
        """Has all ranks agree on the maxima of blocks that they share.

        Args:
            local: this rank's shard by name.
            timeout: seconds.

        Raises:
            ExchangeFailed: another rank is lost, late or at another version; names it.
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
            NotFinite: there is NaN or infinity in it, or in a block that it shares.
        """
        preparation = self._quantiser.preparations[unit.name]
        values = memory[: unit.values_nbytes].view(preparation.values_dtype)
        scales = None
        if preparation.scale_shape is not None:
            flat = memory[unit.scales_at : unit.scales_at + unit.scales_nbytes]
            scales = flat.view(preparation.scale_dtype).view(preparation.scale_shape)
        preparation.prepare(local, values.view(preparation.shape), scales, self._maxima)

    def give_up(self) -> None:
        """Tells the others that this rank doesn't come to the next exchange."""
        self._exchange.give_up()

    def close(self) -> None:
        self._exchange.close()


class _Shards(dict[str, "torch.Tensor"]):
    """Shards by name, each computed when it is looked up, and not kept."""

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
