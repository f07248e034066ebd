"""A decoder's view of prefillers: who there is, who is met, who is asked next."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fabric_ray.errors import FabricError
from fabric_ray.kvcache import Decoder
from fabric_ray.serve.errors import NoPrefill
from fabric_ray.serve.verdicts import Reluctance

logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds in which somebody may come who wasn't lost, before a prompt ends that finds no other."""

_ASK_AGAIN = 1.0
"""Seconds after which one that was lost may be asked once more, where there is no other."""

_LOOK = 0.1
"""Seconds between looks at who there is."""


class Offered(msgspec.Struct, frozen=True):
    """A prefiller that may be asked."""

    replica: str
    """Its name in its deployment; a replica that is replaced gets another."""
    offer: bytes

    @property
    def incarnation(self) -> str:
        """Of the replica's process (MR-2)."""
        return f"{self.replica}/{hashlib.blake2b(self.offer, digest_size=8).hexdigest()}"


class Loss(msgspec.Struct, frozen=True):
    """When a prefiller was lost, by the monotonic clock, and why."""

    at: float
    why: str


class Unmet(FabricError):
    """A prefiller and this decoder don't come together; what was to be asked has no part in it."""


class AllLost(NoPrefill):
    """Every prefiller that there is was lost lately; the message has the cause of each."""


class Discovery(Protocol):
    """Finds prefillers as they come and go."""

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> Offered:
        """The prefiller to ask next; one to avoid only if there is none that is to be avoided less.

        Args:
            avoid: how much, by replica; those that aren't named not at all.
            load: prompts that this decoder waits for, by replica.

        Raises:
            ServeError: it can't be told who there is; the message has the cause.
        """


def least_loaded(
    loads: Mapping[str, float],
    *,
    avoid: Mapping[str, int] | None = None,
    tie: random.Random | None = None,
) -> list[str]:
    """Replicas in the order in which they should be asked: those to avoid least first, then by
    load, in random order where nothing tells them apart."""
    draw, much = (tie or random).random, avoid or {}
    return sorted(loads, key=lambda replica: (much.get(replica, 0), loads[replica], draw()))


class Prefillers:
    """Keeps meetings with prefillers for one decoder.

    Args:
        decoder: which meets them.
        discovery: who there is.
        avoid_lost: seconds in which a lost one, or one that missed a deadline, is asked only if
            there is no other.
    """

    def __init__(self, decoder: Decoder, discovery: Discovery, *, avoid_lost: float) -> None:
        self._decoder, self._discovery, self._avoid_lost = decoder, discovery, avoid_lost
        self._meetings: dict[str, asyncio.Future[int]] = {}
        self._lost: dict[str, Loss] = {}
        self._probed: set[str] = set()
        self._slow: dict[str, float] = {}
        self._asked: dict[str, int] = {}

    async def choose(self, *, tried: Mapping[str, int], timeout: float) -> Offered:
        """The prefiller to ask next: one that was tried, slow or lost only if there is no other.

        Of those that were lost, one prompt at a time asks again whether they are back; the others
        end, for nobody knows whether they ever are.

        Args:
            tried: those that this request was asked of, and their :class:`Reluctance`.
            timeout: seconds.

        Raises:
            TimeoutError: there was none in time.
            AllLost: there are only those that were lost.
            ServeError: it can't be told who there is.
        """
        begun = time.monotonic()
        deadline = begun + timeout
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no prefiller could be asked within {timeout:g} s")
            avoid = self._avoided(now)
            for replica, reluctance in tried.items():
                avoid[replica] = max(reluctance, avoid.get(replica, 0))
            choice = self._discovery.choose(avoid=avoid, load=dict(self._asked))
            try:
                offered = await asyncio.wait_for(choice, deadline - now)
            except asyncio.TimeoutError as error:
                raise TimeoutError(f"no prefiller was found within {timeout:g} s") from error
            if offered.replica not in self._lost or self._ask_again(offered.replica, tried):
                return offered
            if time.monotonic() >= begun + _PATIENCE:
                raise self._all_lost()
            await asyncio.sleep(_LOOK)

    def _ask_again(self, replica: str, tried: Mapping[str, int]) -> bool:
        """Whether to ask a lost one if it is back; who does ends with :meth:`end`."""
        in_vain = tried.get(replica, 0) >= Reluctance.LOST or replica in self._probed
        if in_vain or time.monotonic() < self._lost[replica].at + _ASK_AGAIN:
            return False
        self._probed.add(replica)
        return True

    def _all_lost(self) -> AllLost:
        now = time.monotonic()
        told = "; ".join(
            f"{replica} {now - loss.at:.1f} s ago: {loss.why}"
            for replica, loss in self._lost.items()
        )
        return AllLost(f"all prefillers were lost: {told}")

    def _avoided(self, now: float) -> dict[str, int]:
        since = now - self._avoid_lost
        self._lost = {replica: loss for replica, loss in self._lost.items() if loss.at > since}
        self._slow = {replica: until for replica, until in self._slow.items() if until > now}
        return {
            **dict.fromkeys(self._slow, int(Reluctance.SLOW)),
            **dict.fromkeys(self._lost, int(Reluctance.LOST)),
        }

    async def meet(self, offered: Offered) -> int:
        """The decoder's number for a prefiller, which is met if it isn't yet.

        Raises:
            Unmet: it can't be met; the message lists all that doesn't fit.
        """
        name = offered.incarnation
        known = self._meetings.get(name)
        if known is None or (known.done() and not self._open(known)):
            self._forget_lost()
            met = asyncio.to_thread(self._decoder.meet, offered.offer)
            known = self._meetings[name] = asyncio.ensure_future(met)
        try:
            # Others may wait for the same meeting: who is cancelled doesn't end it.
            return await asyncio.shield(known)
        except (FabricError, OSError) as error:
            raise Unmet(f"it can't be met: {error}") from error

    def begin(self, offered: Offered) -> None:
        """A prompt is asked of it from here on, until :meth:`end`."""
        self._asked[offered.replica] = self._asked.get(offered.replica, 0) + 1

    def end(self, offered: Offered) -> None:
        self._probed.discard(offered.replica)
        left = self._asked.get(offered.replica, 1) - 1
        if left > 0:
            self._asked[offered.replica] = left
        else:
            self._asked.pop(offered.replica, None)

    def slow(self, offered: Offered) -> None:
        """It missed a deadline: others are asked before it for a while."""
        self._slow[offered.replica] = time.monotonic() + self._avoid_lost

    def lost(self, offered: Offered, why: str) -> None:
        """It is gone, or doesn't answer: others are asked before it for a while."""
        self._lost[offered.replica] = Loss(time.monotonic(), why)

    def answered(self, offered: Offered) -> None:
        """It is there: what was known of its loss is over."""
        self._lost.pop(offered.replica, None)

    @property
    def met(self) -> Sequence[str]:
        """Those that can be asked at once."""
        return [name for name, meeting in self._meetings.items() if self._open(meeting)]

    def _open(self, meeting: asyncio.Future[int]) -> bool:
        done = meeting.done() and not meeting.cancelled() and meeting.exception() is None
        return done and self._decoder.knows(meeting.result())

    def _forget_lost(self) -> None:
        for name, meeting in list(self._meetings.items()):
            if meeting.done() and not self._open(meeting):
                del self._meetings[name]
