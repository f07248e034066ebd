"""Which engines write to each rollout: a plan, and the relay groups of its target ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer, Plan, Side, replica_groups
from fabric_ray.weights.relay_groups import RelayGroups
from fabric_ray.weights.report import InboundPlan, TargetShare
from fabric_ray.weights.stripes import containers_of, pages, stripes


class Fanout:
    """Assigns the writers, counts and stripes of each rollout.

    Args:
        plan: from trainer ranks to plan ranks.
        target: the rollouts' side.
        relay: whether replicas share one plan rank and relay versions to each other.
        ranks: the rank of each rollout in ``target``, by number.
        trainers: engine addresses, by rank.
        rollouts: engine addresses, by number.
    """

    def __init__(
        self,
        plan: Plan,
        target: Side,
        *,
        relay: bool,
        ranks: Mapping[int, int],
        trainers: Sequence[bytes],
        rollouts: Mapping[int, bytes],
    ) -> None:
        self.plan = plan
        self._target = target
        self._trainers = trainers
        self._rollouts = dict(rollouts)
        self._replicas = {rank: group for group in replica_groups(target) for rank in group}
        self._plan_rank_of = {r: group[0] if relay else r for r, group in self._replicas.items()}
        self._inbound_plans: dict[int, InboundPlan] = {}
        members: dict[int, list[int]] = {}
        for number, rank in ranks.items():
            members.setdefault(self._plan_rank_of[rank], []).append(number)
        self._groups = RelayGroups(members)

    @property
    def heads(self) -> dict[int, int]:
        """The rollout that trainers write to, by plan rank."""
        return self._groups.heads

    @property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The rollouts that each rollout relays to."""
        return self._groups.children()

    def plan_rank(self, number: int) -> int:
        """The rank of the plan whose bytes a rollout holds."""
        return self._groups.plan_rank(number)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Rollouts that hold the same bytes as a rank."""
        plan_ranks = {self._plan_rank_of[replica] for replica in self._replicas[rank]}
        return tuple(
            number for plan_rank in sorted(plan_ranks) for number in self._groups.members(plan_rank)
        )

    def check(self, rank: int, side: Side) -> None:
        """Checks that a rollout with ``rank`` of ``side`` may join.

        Raises:
            InvalidArgument: the side differs, or has no such rank.
        """
        if side != self._target:
            raise InvalidArgument(
                "rollout can't join: its side differs from the side of the other rollouts; give it "
                "the same side"
            )
        if rank not in self._plan_rank_of:
            raise InvalidArgument(
                f"rollout can't join: got rank {rank}, expected one of {self._target.ranks}"
            )

    def join(self, number: int, rank: int, address: bytes) -> None:
        self._rollouts[number] = address
        self._groups.join(number, self._plan_rank_of[rank])
        self._inbound_plans.clear()

    def leave(self, number: int) -> None:
        """Removes a rollout; does nothing if it has left already."""
        if self._rollouts.pop(number, None) is not None:
            self._groups.leave(number)
            self._inbound_plans.clear()

    @property
    def receiver_imbalance(self) -> float:
        """Bytes that the busiest rollout receives, over the mean."""
        received = self.plan.balance().received
        each = [received[self._groups.plan_rank(number)] for number in self._rollouts]
        return max(each) * len(each) / max(1, sum(each))

    def inbound(self, number: int) -> InboundPlan:
        """The writers and counts of a rollout."""
        if not self._inbound_plans:
            parents = self._groups.parents()
            self._inbound_plans = {n: self._inbound(n, p) for n, p in parents.items()}
        return self._inbound_plans[number]

    def copied_by(self, number: int, giver: int) -> InboundPlan:
        """The inbound plan of a rollout to which ``giver`` copies the version in use."""
        inbound = self._inbound(number, giver)
        return msgspec.structs.replace(inbound, writers=(self._rollouts[giver],))

    def share(
        self,
        session: str,
        number: int,
        name: str,
        inbound: InboundPlan,
        encoded: bytes | None,
        delta: bool,
    ) -> TargetShare:
        """The share of the plan that a rollout is sent."""
        plan_rank = self.plan_rank(number)
        containers = self._containers(plan_rank)
        return TargetShare(session, name, plan_rank, containers, inbound, encoded, delta)

    def _inbound(self, number: int, parent: int | None) -> InboundPlan:
        plan_rank = self.plan_rank(number)
        count = self._groups.stripes(plan_rank)
        containers = self._containers(plan_rank)
        stripe_of = stripes(containers, len(self.plan.containers("target")), count)
        if parent is not None:
            writes = [len(part) for part in containers_of(containers, stripe_of, count)]
            # Every rollout up to the head: if one is lost, no further bytes arrive.
            writers, parents = [self._rollouts[parent]], self._groups.parents()
            while (above := parents[parent]) is not None:
                writers.append(self._rollouts[above])
                parent = above
            return InboundPlan(tuple(writers), tuple(writes), tuple(stripe_of), relayed=True)
        if count == 1:
            expected = [self.plan.expected_pages(plan_rank)]
        else:
            expected = pages(self.plan.for_target(plan_rank), stripe_of, count)
        writers = [self._trainers[link.src] for link in self.plan.links() if link.dst == plan_rank]
        return InboundPlan(tuple(writers), tuple(expected), tuple(stripe_of))

    def _containers(self, plan_rank: int) -> tuple[LocalContainer, ...]:
        return self.plan.local_containers("target", plan_rank)
