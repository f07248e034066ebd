"""A decoder's prefillers: which exist, which are connected, which is asked next."""

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
from fabric_ray.serve.failures import AvoidLevel

logger = logging.getLogger(__name__)

_ALL_LOST_TIMEOUT = 1.0
"""Seconds that a prompt waits for a new prefiller where all known ones are lost."""

_PROBE_AFTER = 1.0
"""Seconds after a loss until one prompt may probe the prefiller, where there is no other."""

_POLL_INTERVAL = 0.1
"""Seconds between looks at the list of prefillers."""


class PrefillerOffer(msgspec.Struct, frozen=True):
    """A prefiller that may be asked."""

    replica: str
    """Its replica's name; a replacement has another name."""
    offer: bytes
    """What :meth:`Prefiller.offer` returned."""

    @property
    def incarnation(self) -> str:
        """Of the replica's process (MR-2)."""
        return f"{self.replica}/{hashlib.blake2b(self.offer, digest_size=8).hexdigest()}"


class Loss(msgspec.Struct, frozen=True):
    """When a prefiller was lost, by the monotonic clock, and why."""

    at: float
    why: str


class ConnectFailed(FabricError):
    """No session with a prefiller could be opened, whatever the request."""


class AllPrefillersLost(NoPrefill):
    """Every known prefiller was lost recently; the message has the cause of each loss."""


class Discovery(Protocol):
    """Finds running prefillers."""

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> PrefillerOffer:
        """The prefiller to ask next: the lowest :class:`AvoidLevel` first, then the lowest load.

        Args:
            avoid: levels by replica; 0 for replicas that aren't named.
            load: prompts that this decoder waits for, by replica.

        Raises:
            ServeError: the list of prefillers can't be read; the message has the cause.
        """


def least_loaded(
    loads: Mapping[str, float],
    *,
    avoid: Mapping[str, int] | None = None,
    tie: random.Random | None = None,
) -> list[str]:
    """Replicas sorted by avoid level, then by load, then at random."""
    draw, levels = (tie or random).random, avoid or {}
    return sorted(loads, key=lambda replica: (levels.get(replica, 0), loads[replica], draw()))


class Prefillers:
    """Keeps one decoder's sessions with prefillers, and selects the next to ask.

    Args:
        decoder: opens the sessions.
        discovery: lists prefillers.
        avoid_lost: seconds for which a prefiller that was lost or missed a deadline is avoided.
    """

    def __init__(self, decoder: Decoder, discovery: Discovery, *, avoid_lost: float) -> None:
        self._decoder, self._discovery, self._avoid_lost = decoder, discovery, avoid_lost
        self._sessions: dict[str, asyncio.Future[int]] = {}
        self._lost: dict[str, Loss] = {}
        self._probed: set[str] = set()
        self._slow: dict[str, float] = {}
        self._asked: dict[str, int] = {}

    async def choose(self, *, tried: Mapping[str, int], timeout: float) -> PrefillerOffer:
        """The prefiller to ask next: one that was tried, slow or lost only if there is no other.

        One prompt at a time probes a lost prefiller. All other prompts fail rather than wait for
        a prefiller that may never return.

        Args:
            tried: replicas that this request was sent to, with their :class:`AvoidLevel`.
            timeout: seconds.

        Raises:
            TimeoutError: no prefiller was found in time.
            AllPrefillersLost: all known prefillers were lost.
            ServeError: the list of prefillers can't be read.
        """
        begun = time.monotonic()
        deadline = begun + timeout
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no prefiller could be asked within {timeout:g} s")
            avoid = self._avoided(now)
            for replica, level in tried.items():
                avoid[replica] = max(level, avoid.get(replica, 0))
            choice = self._discovery.choose(avoid=avoid, load=dict(self._asked))
            try:
                offer = await asyncio.wait_for(choice, deadline - now)
            except asyncio.TimeoutError as error:
                raise TimeoutError(f"no prefiller was found within {timeout:g} s") from error
            if offer.replica not in self._lost or self._start_probe(offer.replica, tried):
                return offer
            if time.monotonic() >= begun + _ALL_LOST_TIMEOUT:
                raise self._all_lost()
            await asyncio.sleep(_POLL_INTERVAL)

    def _start_probe(self, replica: str, tried: Mapping[str, int]) -> bool:
        """Whether this prompt may probe a lost replica; :meth:`end` ends the probe."""
        in_vain = tried.get(replica, 0) >= AvoidLevel.LOST or replica in self._probed
        if in_vain or time.monotonic() < self._lost[replica].at + _PROBE_AFTER:
            return False
        self._probed.add(replica)
        return True

    def _all_lost(self) -> AllPrefillersLost:
        now = time.monotonic()
        losses = "; ".join(
            f"{replica} {now - loss.at:.1f} s ago: {loss.why}"
            for replica, loss in self._lost.items()
        )
        return AllPrefillersLost(f"all prefillers were lost: {losses}")

    def _avoided(self, now: float) -> dict[str, int]:
        since = now - self._avoid_lost
        self._lost = {replica: loss for replica, loss in self._lost.items() if loss.at > since}
        self._slow = {replica: until for replica, until in self._slow.items() if until > now}
        return {
            **dict.fromkeys(self._slow, int(AvoidLevel.SLOW)),
            **dict.fromkeys(self._lost, int(AvoidLevel.LOST)),
        }

    async def connect(self, offer: PrefillerOffer) -> int:
        """The decoder's number for a prefiller; opens a session if there is none.

        Raises:
            ConnectFailed: no session can be opened; the message lists all mismatches.
        """
        name = offer.incarnation
        session = self._sessions.get(name)
        if session is None or (session.done() and not self._is_open(session)):
            self._drop_ended()
            connecting = asyncio.to_thread(self._decoder.connect, offer.offer)
            session = self._sessions[name] = asyncio.ensure_future(connecting)
        try:
            # Other prompts may await the same session: cancelling one must not end it.
            return await asyncio.shield(session)
        except (FabricError, OSError) as error:
            raise ConnectFailed(f"no session: {error}") from error

    def begin(self, offer: PrefillerOffer) -> None:
        """A prompt is sent to this prefiller; :meth:`end` follows."""
        self._asked[offer.replica] = self._asked.get(offer.replica, 0) + 1

    def end(self, offer: PrefillerOffer) -> None:
        self._probed.discard(offer.replica)
        left = self._asked.get(offer.replica, 1) - 1
        if left > 0:
            self._asked[offer.replica] = left
        else:
            self._asked.pop(offer.replica, None)

    def slow(self, offer: PrefillerOffer) -> None:
        """Avoids a prefiller that missed a deadline."""
        self._slow[offer.replica] = time.monotonic() + self._avoid_lost

    def lost(self, offer: PrefillerOffer, why: str) -> None:
        """Avoids a prefiller that is gone, or doesn't answer."""
        self._lost[offer.replica] = Loss(time.monotonic(), why)

    def answered(self, offer: PrefillerOffer) -> None:
        """Forgets the loss of a prefiller that answers."""
        self._lost.pop(offer.replica, None)

    @property
    def connected(self) -> Sequence[str]:
        """Incarnations of prefillers with an open session."""
        return [name for name, session in self._sessions.items() if self._is_open(session)]

    def _is_open(self, session: asyncio.Future[int]) -> bool:
        done = session.done() and not session.cancelled() and session.exception() is None
        return done and self._decoder.is_connected(session.result())

    def _drop_ended(self) -> None:
        for name, session in list(self._sessions.items()):
            if session.done() and not self._is_open(session):
                del self._sessions[name]
