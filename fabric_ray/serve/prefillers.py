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
from fabric_ray.serve.verdicts import Reluctance

logger = logging.getLogger(__name__)


class Offered(msgspec.Struct, frozen=True):
    """A prefiller that may be asked."""

    replica: str
    """Its name in its deployment; a replica that is replaced gets another."""
    offer: bytes

    @property
    def incarnation(self) -> str:
        """Of the replica's process (MR-2)."""
        return f"{self.replica}/{hashlib.blake2b(self.offer, digest_size=8).hexdigest()}"


class Unmet(FabricError):
    """A prefiller and this decoder don't come together; what was to be asked has no part in it."""


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
        avoid_lost: seconds in which a lost one isn't asked again, and one that missed a deadline
            only if there is no other.
    """

    def __init__(self, decoder: Decoder, discovery: Discovery, *, avoid_lost: float) -> None:
        self._decoder, self._discovery, self._avoid_lost = decoder, discovery, avoid_lost
        self._meetings: dict[str, asyncio.Future[int]] = {}
        self._lost: dict[str, float] = {}
        self._slow: dict[str, float] = {}
        self._asked: dict[str, int] = {}

    async def choose(self, *, tried: Mapping[str, int], timeout: float) -> Offered:
        """The prefiller to ask next: never one that was just lost, and one that was tried or slow
        only if there is no other.

        Args:
            tried: those that this request was asked of, and their :class:`Reluctance`.
            timeout: seconds.

        Raises:
            TimeoutError: there was none in time.
            ServeError: it can't be told who there is.
        """
        deadline = time.monotonic() + timeout
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
            if offered.replica not in self._lost:
                return offered
            await asyncio.sleep(0.1)

    def _avoided(self, now: float) -> dict[str, int]:
        self._lost = {replica: until for replica, until in self._lost.items() if until > now}
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
        left = self._asked.get(offered.replica, 1) - 1
        if left > 0:
            self._asked[offered.replica] = left
        else:
            self._asked.pop(offered.replica, None)

    def slow(self, offered: Offered) -> None:
        """It missed a deadline: others are asked before it for a while."""
        self._slow[offered.replica] = time.monotonic() + self._avoid_lost

    def lost(self, offered: Offered) -> None:
        """It is gone, or doesn't answer: it isn't asked for a while."""
        self._lost[offered.replica] = time.monotonic() + self._avoid_lost

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
