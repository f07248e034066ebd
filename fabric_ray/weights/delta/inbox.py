"""A rollout's memory for changes, and their application to the next version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fabric_ray._native import DeltaDecoder
from fabric_ray.engine import TransferEngine
from fabric_ray.plan import Copy, Plan
from fabric_ray.weights.delta.pieces import inbox_shares, itemsizes, pieces, threads
from fabric_ray.weights.report import Changes, InboundPlan, TargetShare
from fabric_ray.weights.staging import ReceiveMemory, StagingMemory


class DeltaInbox:
    """Receives the changes of all trainers. It takes 1/4 of the bytes of a version.

    Args:
        plan: from trainers to rollouts.
        plan_rank: the rank of the plan whose bytes the rollout holds.
        offsets: of each container of the target side in staging memory; -1: not held here.
    """

    def __init__(
        self, engine: TransferEngine, plan: Plan, plan_rank: int, offsets: Sequence[int]
    ) -> None:
        # A rollout may hold nothing of an uneven division.
        self._shares = inbox_shares(plan).get(plan_rank, {})
        self._engine = engine
        self._nbytes = sum(share.nbytes for share in self._shares.values())
        self._memory = ReceiveMemory(engine, self._nbytes)
        sizes = itemsizes(plan.local_containers("target", plan_rank))
        by_trainer: dict[int, list[Copy]] = {}
        for copy in plan.for_target(plan_rank):
            by_trainer.setdefault(copy.peer, []).append(copy)
        self._decoders: dict[int, DeltaDecoder] = {}
        for trainer, copies in by_trainer.items():
            these = pieces(copies)
            each = [sizes[piece.dst_container] for piece in these]
            self._decoders[trainer] = DeltaDecoder(these, each, offsets)

    @classmethod
    def of(
        cls, engine: TransferEngine, share: TargetShare, offsets: Sequence[int]
    ) -> DeltaInbox | None:
        """The inbox of a rollout; ``None`` if pushes don't send changes."""
        if not share.delta or share.plan is None:
            return None
        return cls(engine, Plan.from_bytes(share.plan), share.plan_rank, offsets)

    def descriptor(self, inbound: InboundPlan) -> bytes | None:
        """The region for changes; ``None`` if versions have to come whole, to be relayed."""
        if inbound.relayed or len(inbound.pages) > 1:
            return None
        return self._memory.region.descriptor().to_bytes()

    def apply(
        self, changes: Mapping[int, Changes], base: StagingMemory, target: StagingMemory
    ) -> bool:
        """Makes the next version of the one in use; returns whether its bytes are the trainers'.

        Pieces that are not among the changes have arrived whole.

        Args:
            changes: by trainer.
            base: memory of the version in use.
            target: memory of the next version; may be ``base``.
        """
        same = True
        for trainer, sent in changes.items():
            found = self._decoders[trainer].apply(
                [int(index) for index in np.frombuffer(sent.pieces, dtype="<u4")],
                self._memory.region,
                self._shares[trainer].offset,
                sent.nbytes,
                base.region,
                target.region,
                threads(),
            )
            same = same and found == sent.digest
        return same

    def revoke(self) -> None:
        """Refuses writes of an earlier push from now on (MR-2)."""
        if not self._memory.revoke():
            self._memory = ReceiveMemory(self._engine, self._nbytes)
