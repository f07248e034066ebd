"""One rank of a group: a Ray actor with an engine, an exchange, and its share of the experts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from torch import Tensor

from fabric_ray import runtime
from fabric_ray.kernels import Launcher
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.layer import Traffic
from fabric_ray.moe.model import MoeModel, MoeModelConfig


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a group are made with."""

    model: MoeModelConfig
    seed: int
    ranks: int
    max_tokens: int
    timeout: float
    deterministic: bool
    threads: int
    engine: dict[str, Any]
    device: str | None = None
    """What tokens lie on; the host if ``None``."""
    launcher: Callable[[], Launcher] | None = None
    """Makes what launches kernels there, in place of that GPU."""

    def __repr__(self) -> str:
        # Without `engine`: a token may be among its fields.
        return f"Options(model={self.model!r}, ranks={self.ranks}, device={self.device!r})"


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

    logits: list[Tensor]
    lost: dict[int, str]
    """Ranks that this rank has given up, with causes."""
    traffic: Traffic
    seconds: float


class Rank:
    """The actor of one rank. The group's controller makes one call at a time, except calls of the
    concurrency group ``watch``, which run during a pass. The exchange decodes and checks the cards
    of other ranks; nothing that ranks send each other is unpickled."""

    def __init__(self, rank: int, options: Options) -> None:
        self._rank, self._options = rank, options
        moe = options.model.moe
        if options.device is not None:
            # An engine knows a GPU by the context that it finds.
            torch.zeros(1, dtype=torch.uint8, device=options.device)
        self._engine = runtime.engine(**options.engine)
        self._exchange = AllToAll(
            self._engine,
            rank=rank,
            ranks=options.ranks,
            experts=moe.experts,
            topk=moe.topk,
            hidden=moe.hidden,
            max_tokens=options.max_tokens,
            dtype=moe.torch_dtype,
            answer_dtype=moe.torch_dtype,
            timeout=options.timeout,
            device=options.device,
            launcher=None if options.launcher is None else options.launcher(),
        )
        self._model = MoeModel(
            options.model,
            seed=options.seed,
            exchange=self._exchange,
            max_tokens=options.max_tokens,
            deterministic=options.deterministic,
            shrink=True,  # Each pass reports lost ranks.
        )

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

    def card(self, only: int | None = None) -> bytes:
        return self._exchange.card(only)

    def connect(self, cards: Sequence[bytes | None]) -> None:
        self._exchange.connect(cards)

    def admit(self, card: bytes) -> None:
        self._exchange.admit(card)

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

    def run(self, sequences: Sequence[Sequence[int]], last: bool, rounds: int) -> Pass:
        """Reads sequences, as :meth:`MoeModel.forward`; all ranks at the same time."""
        begin = time.perf_counter()
        torch.set_num_threads(self._options.threads)  # of this thread
        before = self._model.traffic
        logits = self._model.forward(sequences, last=last, rounds=rounds)
        self._exchange.check()
        return Pass(
            logits=[part.cpu().clone() for part in logits],
            lost=self._lost(),
            traffic=self._model.traffic - before,
            seconds=time.perf_counter() - begin,
        )

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
