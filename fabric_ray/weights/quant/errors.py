"""What is refused about formats, layouts and values."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class QuantError(FabricError, ValueError):
    """A tensor that can't be converted as asked. ``tensor``, ``container``, ``rank`` if known."""


class UnsupportedFormat(QuantError):
    """A format that means nothing for a tensor, or several for one container."""


class UnalignedBlocks(QuantError):
    """An engine's share of a tensor that doesn't begin and end with its blocks."""


class NotFinite(QuantError):
    """NaN or infinity in a tensor, or a value beyond what the new dtype holds."""


class ExchangeFailed(FabricError):
    """Block maxima did not arrive. ``ranks``: the missing senders; ``version``."""

    ranks: tuple[int, ...]
    version: int
