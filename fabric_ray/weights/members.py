"""Which rollouts hold the same, and who of them is fed by whom."""

from __future__ import annotations

from collections.abc import Mapping

STRIPES = 8
"""Parts of a version that are passed on each by itself: while one is sent, the next arrives."""


class Members:
    """Rollouts by places. A place is a rank of the layout that trainers write to; whoever holds the
    same as that rank belongs there.

    The first at a place, its head, is fed by trainers. The others form a chain behind it: each is
    fed by the one before. Where a chain would take longer than a tree of two branches, a tree.

    Args:
        places: members by place, in the order of the chain.
    """

    def __init__(self, places: Mapping[int, list[int]]) -> None:
        self._places = {place: list(members) for place, members in places.items()}

    @property
    def heads(self) -> dict[int, int]:
        """Who is fed by trainers, by place; places that nobody is at are left out."""
        return {place: members[0] for place, members in self._places.items() if members}

    def at(self, place: int) -> tuple[int, ...]:
        """Who is at a place."""
        return tuple(self._places.get(place, ()))

    def place(self, member: int) -> int:
        """Where a member is.

        Raises:
            KeyError: nowhere.
        """
        for place, members in self._places.items():
            if member in members:
                return place
        raise KeyError(member)

    def feeders(self) -> dict[int, int | None]:
        """By whom each member is fed; ``None``: by trainers."""
        out: dict[int, int | None] = {}
        for members in self._places.values():
            branches = _branches(len(members))
            for i, member in enumerate(members):
                out[member] = members[(i - 1) // branches] if i else None
        return out

    def fed_by(self) -> dict[int, tuple[int, ...]]:
        """Whom each member feeds; those who feed nobody are left out."""
        out: dict[int, tuple[int, ...]] = {}
        for member, feeder in self.feeders().items():
            if feeder is not None:
                out[feeder] = (*out.get(feeder, ()), member)
        return out

    def stripes(self, place: int) -> int:
        """Into how many parts a version is divided on its way to a place."""
        return STRIPES if len(self.at(place)) > 1 else 1

    def join(self, member: int, place: int) -> None:
        self._places.setdefault(place, []).append(member)

    def leave(self, member: int) -> None:
        """The last takes the place of one who leaves, so that few are fed by another then."""
        members = self._places[self.place(member)]
        at, last = members.index(member), members.pop()
        if last != member:
            members[at] = last


def _branches(count: int) -> int:
    """How many each feeds: what takes least, in units of the time that a stripe takes a link."""
    chain = STRIPES + max(0, count - 2)
    tree = 2 * (STRIPES + max(0, count.bit_length() - 2))
    return 1 if chain <= tree else 2
