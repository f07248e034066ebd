"""Parameters that prefillers and decoders share."""

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
    """Heartbeats and limits of an end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beat: float = Field(default=0.5, ge=0.001, le=3600)
    """Heartbeat interval, in seconds."""
    silence: float = Field(default=5.0, gt=0)
    """Heartbeat timeout, in seconds, at least two intervals: the session with a silent peer ends
    and its requests fail. The engine reports a dead process sooner (RS-4)."""
    max_message: int = Field(default=1 << 20, ge=4096, le=1 << 28)
    """Most bytes of one request; each token of a prompt takes about 4."""
    tail_nbytes: int = Field(default=0, ge=0)
    """Bytes of the tail that follows the last page; see :attr:`InferenceEngine.tail`."""
    max_payloads: int = Field(default=1 << 28, ge=4096)
    """Most bytes of the payloads of all requests of a prefiller, at least ``max_message``; further
    requests are refused."""

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
    """The cache of one rank in this process."""

    engine: TransferEngine
    """Writes from the cache, or receives writes to it. The first rank's engine also receives
    messages: don't use its receive pool otherwise."""
    layout: CacheLayout
    buffers: Sequence[Region]
    """The regions that :attr:`CacheLayout.buffers` describes, in its order."""
    tail: Region | None = None
    """Slots of :attr:`Terms.tail_nbytes` each; only the first rank needs them."""


def encoded(
    ranks: Sequence[RankCache], layouts: Sequence[CacheLayout] | None, first: int
) -> tuple[list[bytes], list[_Rank]]:
    """Layouts of all ranks, and the local ranks, as the native core takes them."""
    if not ranks:
        raise InvalidArgument("ranks: got none, expected at least one local rank")
    all_layouts = [rank.layout for rank in ranks] if layouts is None else list(layouts)
    local: list[_Rank] = [
        (first + i, rank.engine, list(rank.buffers), rank.tail) for i, rank in enumerate(ranks)
    ]
    return [msgspec.msgpack.encode(layout) for layout in all_layouts], local


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A callback that doesn't keep the method's object alive. The native core keeps the callback
    and the object keeps the native core; the garbage collector can't see that cycle."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return call
