"""Leases of finished prefills, which decoders renew for requests that wait in their queue.

A decoder's scheduler names the leases, its workers renew them with heartbeats, and the prefiller's
workers keep the pages for another lease. A decoder that is killed or paused renews none. Neither
does a prefiller take renewals while one of its prompts lacks blocks for long: requests of the
decoder may wait for that prompt.
"""

from __future__ import annotations

import hashlib
import time


def lease_number(transfer: str) -> int:
    """The number of a transfer's lease in heartbeats, which are short. Two transfers with the same
    number renew each other's."""
    return int.from_bytes(hashlib.blake2b(transfer.encode(), digest_size=8).digest(), "little")


class Renewals:
    """Leases that the requests in a decoder's queue need.

    Args:
        interval: least seconds between two renewals.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._named = 0.0
        self._queued: dict[str, tuple[str, int]] = {}

    def add(self, request: str, offer: str, transfer: str) -> None:
        """A request is in the queue: the prefiller of this offer keeps its pages."""
        self._queued[request] = offer, lease_number(transfer)

    def drop(self, request: str) -> None:
        """A request has left the queue, if it was there."""
        self._queued.pop(request, None)

    def names(self, transfer: str) -> bool:
        """Whether a request in the queue needs this transfer."""
        number = lease_number(transfer)
        return any(lease == number for _, lease in self._queued.values())

    def due(self) -> dict[str, list[int]]:
        """The leases to renew now, by the prefiller's offer."""
        leases: dict[str, list[int]] = {}
        now = time.monotonic()
        if self._queued and now - self._named >= self._interval:
            self._named = now
            for offer, lease in self._queued.values():
                leases.setdefault(offer, []).append(lease)
        return leases


class Admissions:
    """Prompts that vLLM's scheduler has looked at, and not given blocks.

    Args:
        patience: seconds after which they count as starved.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since: dict[str, float] = {}  # the oldest one is first

    def tried(self, request: str) -> None:
        """vLLM looks at a request that is next."""
        self._since.setdefault(request, time.monotonic())

    def over(self, request: str) -> None:
        """A request has blocks, or needs none any more."""
        self._since.pop(request, None)

    @property
    def are_starved(self) -> bool:
        oldest = next(iter(self._since.values()), None)
        return oldest is not None and time.monotonic() - oldest > self._patience
