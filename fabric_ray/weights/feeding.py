"""Who writes what to whom: a plan, and the rollouts at each of its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer, Plan, Side, twins
from fabric_ray.weights.members import Members
from fabric_ray.weights.report import Feed, TargetShare
from fabric_ray.weights.stripes import containers_of, pages, stripes


class Feeding:
    """What each rollout is fed by, and what that means for it.

    Args:
        plan: from trainers to places.
        target: what all rollouts hold.
        relay: whether ranks that hold the same share one place.
        ranks: of the rollouts, by number.
        trainers: addresses of their engines, by rank.
        rollouts: addresses of their engines, by number.
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
        self._twins = {rank: group for group in twins(target) for rank in group}
        self._place_of = {r: group[0] if relay else r for r, group in self._twins.items()}
        self._fed: dict[int, Feed] = {}
        members: dict[int, list[int]] = {}
        for number, rank in ranks.items():
            members.setdefault(self._place_of[rank], []).append(number)
        self._members = Members(members)

    @property
    def heads(self) -> dict[int, int]:
        """Whom trainers write to: rollouts by place."""
        return self._members.heads

    @property
    def fed_by(self) -> dict[int, tuple[int, ...]]:
        """Whom each rollout passes on to."""
        return self._members.fed_by()

    def place(self, number: int) -> int:
        """The rank, of those that trainers write to, that holds the same."""
        return self._members.place(number)

    def alike(self, rank: int) -> tuple[int, ...]:
        """Rollouts that hold the same as a rank."""
        places = {self._place_of[twin] for twin in self._twins[rank]}
        return tuple(number for place in sorted(places) for number in self._members.at(place))

    def check(self, rank: int, side: Side) -> None:
        """Whether somebody who holds ``rank`` of ``side`` may join.

        Raises:
            InvalidArgument: the side is another.
        """
        if side != self._target:
            raise InvalidArgument(
                "a rollout that joins describes another target layout than the others; give it "
                "the same side"
            )
        if rank not in self._place_of:
            raise InvalidArgument(f"the rollouts' layout has no rank {rank} that could join")

    def join(self, number: int, rank: int, address: bytes) -> None:
        self._rollouts[number] = address
        self._members.join(number, self._place_of[rank])
        self._fed.clear()

    def leave(self, number: int) -> None:
        """Whoever it is, from whatever place."""
        if self._rollouts.pop(number, None) is not None:
            self._members.leave(number)
            self._fed.clear()

    @property
    def receiver_imbalance(self) -> float:
        """What the busiest rollout receives over the mean."""
        received = self.plan.balance().received
        each = [received[self._members.place(number)] for number in self._rollouts]
        return max(each) * len(each) / max(1, sum(each))

    def feed(self, number: int) -> Feed:
        """By whom a rollout is fed."""
        if not self._fed:
            feeders = self._members.feeders()
            self._fed = {one: self._feed(one, feeder) for one, feeder in feeders.items()}
        return self._fed[number]

    def given_by(self, number: int, giver: int) -> Feed:
        """How a rollout is fed that another gives a version to."""
        feed = self._feed(number, giver)
        return msgspec.structs.replace(feed, writers=(self._rollouts[giver],))

    def share(
        self, session: str, number: int, name: str, feed: Feed, encoded: bytes | None
    ) -> TargetShare:
        """What to tell a rollout."""
        place = self.place(number)
        return TargetShare(session, name, place, self._containers(place), feed, encoded)

    def _feed(self, number: int, feeder: int | None) -> Feed:
        place = self.place(number)
        count = self._members.stripes(place)
        containers = self._containers(place)
        stripe_of = stripes(containers, len(self.plan.containers("target")), count)
        if feeder is not None:
            writes = [len(part) for part in containers_of(containers, stripe_of, count)]
            # All up to the head: whoever is lost, nothing more comes.
            writers, feeders = [self._rollouts[feeder]], self._members.feeders()
            while (above := feeders[feeder]) is not None:
                writers.append(self._rollouts[above])
                feeder = above
            return Feed(tuple(writers), tuple(writes), tuple(stripe_of), relayed=True)
        if count == 1:
            expected = [self.plan.expected_pages(place)]
        else:
            expected = pages(self.plan.for_target(place), stripe_of, count)
        writers = [self._trainers[link.src] for link in self.plan.links() if link.dst == place]
        return Feed(tuple(writers), tuple(expected), tuple(stripe_of))

    def _containers(self, place: int) -> tuple[LocalContainer, ...]:
        return self.plan.local_containers("target", place)
