"""What of one rank's share of a push is under way, and what became of it."""

from __future__ import annotations

import time
from typing import NamedTuple

from fabric_ray._native import Batch, CounterRef, Digest, Transfer
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError
from fabric_ray.weights.report import Arm, LinkReport, Sent, Span


class Route(NamedTuple):
    """What one step has for one rollout and stripe, ready to be submitted at every push."""

    stripe: int
    batch: Batch
    digest: Digest
    nbytes: int


class _UnderWay(NamedTuple):
    step: int
    rollout: int
    transfer: Transfer


class Sending:
    """Sends steps in order. A rollout that can't be reached gets no more of them.

    Args:
        deadline: by ``time.monotonic()``, for all of them together.
    """

    def __init__(self, rank: int, engine: TransferEngine, deadline: float) -> None:
        self._rank = rank
        self._engine = engine
        self._deadline = deadline
        self._under_way: list[_UnderWay] = []
        self._failed: dict[int, str] = {}
        self._digests: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._transports: dict[int, str | None] = {}

    def send(self, step: int, arm: Arm, route: Route) -> None:
        """Submits what a step has for a rollout."""
        if arm.rank in self._failed:
            return
        self._began.setdefault(arm.rank, time.perf_counter())
        left = max(1e-3, self._deadline - time.monotonic())
        try:
            transfer = self._engine.submit(
                route.batch, imm=CounterRef.from_bytes(arm.counters[route.stripe]), timeout=left
            )
        except FabricError as error:
            self._failed[arm.rank] = str(error)
            return
        self._under_way.append(_UnderWay(step, arm.rank, transfer))
        self._nbytes[arm.rank] = self._nbytes.get(arm.rank, 0) + route.nbytes

    def add_digest(self, arm: Arm, route: Route) -> None:
        """Adds that of what a step has for a rollout; to be called while it still lies there."""
        if arm.rank not in self._failed:
            sum_ = self._digests.get(arm.rank, 0) + route.digest.compute()
            self._digests[arm.rank] = sum_ & ((1 << 64) - 1)

    def wait_for(self, step: int) -> None:
        """Returns when nothing of any step up to this one is under way."""
        over = [sent for sent in self._under_way if sent.step <= step]
        self._under_way = [sent for sent in self._under_way if sent.step > step]
        for _, rollout, transfer in over:
            try:
                transfer.wait()
            except FabricError as error:
                self._failed.setdefault(rollout, str(error))
                continue
            self._ended[rollout] = time.perf_counter()
            self._transports[rollout] = transfer.transport

    def result(self, spans: list[Span]) -> Sent:
        """What became of it all; nothing may be under way any more."""
        links = tuple(
            LinkReport(
                self._rank,
                rollout,
                nbytes,
                self._ended[rollout] - self._began[rollout],
                self._transports[rollout],
            )
            for rollout, nbytes in self._nbytes.items()
            if rollout not in self._failed
        )
        digests = {} if self._failed else self._digests
        return Sent(tuple(spans), links, self._failed, digests)
