"""Sends one rank's share of a push, step by step."""

from __future__ import annotations

import time
from typing import NamedTuple

from fabric_ray._native import Batch, CounterRef, Digest, Transfer
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError
from fabric_ray.weights.report import LinkReport, PushTarget, Sent, Span


class Route(NamedTuple):
    """One step's batch for one rollout and stripe, submitted anew by every push."""

    stripe: int
    batch: Batch
    digest: Digest
    nbytes: int


class _InFlight(NamedTuple):
    step: int
    rollout: int
    transfer: Transfer


class StepSender:
    """Sends steps in order. After an error, a rollout is sent no further steps.

    Args:
        deadline: of the whole push, by ``time.monotonic()``.
    """

    def __init__(self, rank: int, engine: TransferEngine, deadline: float) -> None:
        self._rank = rank
        self._engine = engine
        self._deadline = deadline
        self._in_flight: list[_InFlight] = []
        self._failed: dict[int, str] = {}
        self._digests: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._transports: dict[int, str | None] = {}

    def send(self, step: int, target: PushTarget, route: Route) -> None:
        """Submits a step's batch for a rollout."""
        if target.rank in self._failed:
            return
        self._began.setdefault(target.rank, time.perf_counter())
        left = max(1e-3, self._deadline - time.monotonic())
        try:
            transfer = self._engine.submit(
                route.batch, imm=CounterRef.from_bytes(target.counters[route.stripe]), timeout=left
            )
        except FabricError as error:
            self._failed[target.rank] = str(error)
            return
        self._in_flight.append(_InFlight(step, target.rank, transfer))
        self._nbytes[target.rank] = self._nbytes.get(target.rank, 0) + route.nbytes

    def add_digest(self, target: PushTarget, route: Route) -> None:
        """Adds the digest of a route's bytes. Call it before their memory is reused."""
        if target.rank not in self._failed:
            sum_ = self._digests.get(target.rank, 0) + route.digest.compute()
            self._digests[target.rank] = sum_ & ((1 << 64) - 1)

    def wait_for(self, step: int) -> None:
        """Waits until no transfer of this step or an earlier one is in flight."""
        done = [sent for sent in self._in_flight if sent.step <= step]
        self._in_flight = [sent for sent in self._in_flight if sent.step > step]
        for _, rollout, transfer in done:
            try:
                transfer.wait()
            except FabricError as error:
                self._failed.setdefault(rollout, str(error))
                continue
            self._ended[rollout] = time.perf_counter()
            self._transports[rollout] = transfer.transport

    def result(self, spans: list[Span]) -> Sent:
        """The result of all steps, once no transfer is in flight."""
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
