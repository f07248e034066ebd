"""One rank of a group: a Ray actor with an engine, an exchange, and its share of the experts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import ray
import torch

from fabric_ray import runtime
from fabric_ray.moe.all_to_all import AllToAll

Build: TypeAlias = Callable[[AllToAll], Callable[[Any], Any]]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a group are made with."""

    build: Build
    exchange: dict[str, Any]
    engine: dict[str, Any]

    def __repr__(self) -> str:
        # Without `engine`: a token may be among its fields.
        return f"Options(build={self.build!r}, exchange={self.exchange!r})"


class Member(msgspec.Struct, frozen=True):
    """The actor that has a rank, in one incarnation."""

    rank: int
    actor_id: str
    incarnation: str
    """The id of its engine, different after every start."""
    node_id: str
    pid: int
    born: int
    """Start time of its process in kernel ticks, which tells it from a later process of that
    pid."""


class Pass(msgspec.Struct, frozen=True):
    """The result of one rank's pass."""

    outputs: list[Any]
    lost: dict[int, str]
    """Ranks that this rank has given up, with causes."""


class Rank:
    """The actor of one rank. The group's controller makes one call at a time, except calls of the
    concurrency group ``watch``, which run during a pass. The exchange decodes and checks the
    descriptors of other ranks; nothing that ranks send each other is unpickled."""

    def __init__(self, rank: int, options: Options) -> None:
        self._rank = rank
        if (device := options.exchange.get("device")) is not None:
            # An engine knows a GPU by the context that it finds.
            torch.zeros(1, dtype=torch.uint8, device=device)
        self._engine = runtime.engine(**options.engine)
        self._exchange = AllToAll(self._engine, rank=rank, **options.exchange)
        self._model = options.build(self._exchange)

    def member(self) -> Member:
        context = ray.get_runtime_context()
        return Member(
            self._rank,
            str(context.get_actor_id()),
            self._engine.id,
            str(context.get_node_id()),
            os.getpid(),
            _born(os.getpid()) or 0,
        )

    def explain(self) -> str:
        """What the exchange's memory is for."""
        return self._exchange.explain()

    def descriptor(self, only: int | None = None) -> bytes:
        return self._exchange.descriptor(only)

    def connect(self, descriptors: Sequence[bytes | None]) -> None:
        self._exchange.connect(descriptors)

    def admit(self, descriptor: bytes) -> None:
        self._exchange.admit(descriptor)

    def mask(self, rank: int, cause: str) -> None:
        """Gives a rank up, unless it was given up before."""
        if self._exchange.present[rank]:
            self._exchange.mask(rank, cause)

    @ray.method(concurrency_group="watch")
    def lost(self) -> dict[int, str]:
        """Ranks that this rank has given up, with causes."""
        return self._lost()

    def _lost(self) -> dict[int, str]:
        return {one.rank: f"{one.stage}: {one.cause}" for one in self._exchange.lost}

    @ray.method(concurrency_group="watch")
    def end(self, member: Member) -> None:
        """Ends the process of a rank on this node. Ray asks a process to end, and one that is
        stopped doesn't hear; until it has ended it might write to memory that it shared (MR-1)."""
        if _born(member.pid) == member.born:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)

    def run(self, inputs: Sequence[Any]) -> Pass:
        """Has the model read inputs, one after the other; all ranks at the same time, each as
        many."""
        outputs = [self._model(one) for one in inputs]
        self._exchange.check()
        return Pass(outputs, self._lost())

    def close(self) -> None:
        """Parts with all others: to them it is lost."""
        runtime.shutdown()


def _born(pid: int) -> int | None:
    """When a process of this host began, in clock ticks since the host did."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name before it may hold anything.
    return int(stat.rpartition(")")[2].split()[19])
