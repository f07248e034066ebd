"""Rollouts that hold the same bytes, and the trees along which they relay a version."""

from __future__ import annotations

from collections.abc import Mapping

STRIPES = 8
"""Parts of a version that are relayed separately: one is sent while the next arrives."""


class RelayGroups:
    """Replicas, grouped by plan rank: the rank of the target layout that trainers write to.

    Trainers write to the first member of a group, its head. The other members form a chain behind
    it: each receives from the member before. A binary tree replaces the chain where it is faster.

    Args:
        groups: members by plan rank, in the order of the chain.
    """

    def __init__(self, groups: Mapping[int, list[int]]) -> None:
        self._groups = {plan_rank: list(members) for plan_rank, members in groups.items()}

    @property
    def heads(self) -> dict[int, int]:
        """The member that trainers write to, by plan rank; empty groups are left out."""
        return {plan_rank: members[0] for plan_rank, members in self._groups.items() if members}

    def members(self, plan_rank: int) -> tuple[int, ...]:
        return tuple(self._groups.get(plan_rank, ()))

    def plan_rank(self, member: int) -> int:
        """The plan rank of a member's group.

        Raises:
            KeyError: no group has this member.
        """
        for plan_rank, members in self._groups.items():
            if member in members:
                return plan_rank
        raise KeyError(member)

    def parents(self) -> dict[int, int | None]:
        """The member that each member receives from; ``None`` for heads."""
        out: dict[int, int | None] = {}
        for members in self._groups.values():
            branches = _branches(len(members))
            for i, member in enumerate(members):
                out[member] = members[(i - 1) // branches] if i else None
        return out

    def children(self) -> dict[int, tuple[int, ...]]:
        """The members that each member relays to; leaves of the tree are left out."""
        out: dict[int, tuple[int, ...]] = {}
        for member, parent in self.parents().items():
            if parent is not None:
                out[parent] = (*out.get(parent, ()), member)
        return out

    def stripes(self, plan_rank: int) -> int:
        """Number of stripes of a version on its way to a group."""
        return STRIPES if len(self.members(plan_rank)) > 1 else 1

    def join(self, member: int, plan_rank: int) -> None:
        self._groups.setdefault(plan_rank, []).append(member)

    def leave(self, member: int) -> None:
        """Removes a member. The last member takes its position, so that few parents change."""
        members = self._groups[self.plan_rank(member)]
        at, last = members.index(member), members.pop()
        if last != member:
            members[at] = last


def _branches(count: int) -> int:
    """Children per member, 1 or 2: the faster, in units of one stripe's time on a link."""
    chain = STRIPES + max(0, count - 2)
    tree = 2 * (STRIPES + max(0, count.bit_length() - 2))
    return 1 if chain <= tree else 2
