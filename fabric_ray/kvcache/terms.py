"""What both ends of a transfer are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kvcache.layout import CacheLayout

_Rank = tuple[int, TransferEngine, list[Region], Region | None]
_Terms = tuple[float, float, int, int, int]


class Terms(BaseModel):
    """What an end holds others to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beat: float = Field(default=0.5, ge=0.001, le=3600)
    """Seconds between a decoder's beats."""
    silence: float = Field(default=5.0, gt=0)
    """Who says nothing for so many seconds is given up, with all that it has under way. Two beats
    at least; what the engine knows of a dead process comes sooner (RS-4)."""
    max_message: int = Field(default=1 << 20, ge=4096, le=1 << 28)
    """The longest request that is taken, bytes: 4 bytes for each token of a prompt, and some."""
    tail_nbytes: int = Field(default=0, ge=0)
    """Bytes that come with the last page, as :attr:`InferenceEngine.tail` lays them out."""
    max_payloads: int = Field(default=1 << 28, ge=4096)
    """Bytes of the payloads of all requests that a prefiller has, one longest message at least;
    what would go beyond is refused."""

    def _native(self) -> _Terms:
        return (
            self.beat,
            self.silence,
            self.max_message,
            self.tail_nbytes,
            self.max_payloads,
        )


@dataclass(frozen=True)
class RankCache:
    """The cache of one rank that lives in this process."""

    engine: TransferEngine
    """That writes from it, or that others' writes come through. The first rank's takes messages
    too: its receive pool belongs to the transfer."""
    layout: CacheLayout
    buffers: Sequence[Region]
    """What :attr:`CacheLayout.buffers` are, in their order."""
    tail: Region | None = None
    """Slots of :attr:`Terms.tail_nbytes` each; used of the first rank only."""


def encoded(
    ranks: Sequence[RankCache], layouts: Sequence[CacheLayout] | None, first: int
) -> tuple[list[bytes], list[_Rank]]:
    """Layouts of all ranks, and the local ranks, as the native core takes them."""
    if not ranks:
        raise InvalidArgument("an end needs one rank at least")
    every = [rank.layout for rank in ranks] if layouts is None else list(layouts)
    local: list[_Rank] = [
        (first + i, rank.engine, list(rank.buffers), rank.tail) for i, rank in enumerate(ranks)
    ]
    return [msgspec.msgpack.encode(layout) for layout in every], local


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A method as the native core keeps it: without its object, whose native half would be kept by
    it in turn, and no collector sees through that."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = weak()
        if found is not None:
            found(*args)

    return call
