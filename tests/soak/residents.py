"""Processes that live as long as a soak does, and what they hold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fabric_ray import (
    Counter,
    CounterRef,
    EngineAddress,
    Region,
    RegionDescriptor,
    TransferEngine,
)
from tests.chaos.belongings import Belongings, in_use
from tests.chaos.kv.decode import Came, DecoderProcess
from tests.chaos.kv.draw import Ask, Side
from tests.chaos.kv.prefill import PrefillerProcess
from tests.soak.trend import Sample

PAGE, PAGES = 4096, 16
SHORT_S = 0.05
PATIENCE_S = 30.0
# Half-open connections are given up after 2 s.
SETTLED_S = 5.0


def resident(connection: Connection, make: Callable[..., Any], *args: Any) -> None:
    """Makes something, and answers calls of its methods."""
    made = make(*args)
    connection.send(None)
    while True:
        name, values = connection.recv()
        connection.send(getattr(made, name)(*values))


def sample(began: float, peers: int) -> Sample:
    """What this process holds once peers that have left are forgotten."""
    deadline = time.monotonic() + SETTLED_S
    held = Belongings()
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, held = held, Belongings()
        if held.fds == before.fds:
            break
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = sum(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) << 10
    return Sample(
        seconds=time.monotonic() - began,
        in_use=in_use(),
        resident=anonymous,
        descriptors=len(held.fds),
        threads=len(os.listdir("/proc/self/task")),
        mappings=held.maps,
        peers=peers,
    )


@dataclass(frozen=True)
class Offer:
    """What one visitor is given for one round."""

    owner: EngineAddress
    pages: RegionDescriptor
    lasting: RegionDescriptor
    """Half of the pages, for this visit alone."""
    brief: RegionDescriptor
    """The other half, which ends by itself."""
    counter: CounterRef


@dataclass
class _Held:
    region: Region
    grants: tuple[Region, Region]
    counter: Counter
    alien: np.ndarray[Any, Any] | None


class Hub:
    """An engine that others visit: its regions, grants and counters last a round each."""

    def __init__(self, transport: str) -> None:
        self._engine = TransferEngine(name="hub", transport=transport, op_timeout=PATIENCE_S)
        self._heard = 0
        self._engine.receive(self._hear)
        self._held: list[_Held] = []
        self._met = 0
        self._began = time.monotonic()

    def _hear(self, _: Any) -> None:
        self._heard += 1

    def offer(self, visitors: int) -> list[Offer]:
        """Makes room for so many."""
        return [self._room(i) for i in range(visitors)]

    def _room(self, number: int) -> Offer:
        engine, nbytes, alien = self._engine, PAGE * PAGES, None
        if number % 2:
            alien = np.zeros(nbytes, np.uint8)
            region = engine.register(alien)
        else:
            region = engine.alloc(nbytes)
        grants = region.grant(0, nbytes // 2), region.grant(nbytes // 2, ttl=SHORT_S)
        counter = engine.counter()
        self._held.append(_Held(region, grants, counter, alien))
        lasting, brief = (g.descriptor() for g in grants)
        return Offer(engine.address, region.descriptor(), lasting, brief, counter.ref)

    def settle(self, written: Sequence[int | None]) -> list[str]:
        """Takes everything back; what is wrong, given how many pages each visitor knows to have
        arrived; ``None`` of one that was killed."""
        wrong = []
        for held, pages in zip(self._held, written, strict=True):
            if pages is not None:
                held.counter.wait(pages, timeout=PATIENCE_S)
                if held.counter.value != pages:
                    wrong.append(f"IC-1: {held.counter.value} counts of {pages} pages")
                bad = int((held.region.numpy()[: PAGE * PAGES // 2] != 7).sum())
                if bad:
                    wrong.append(f"IC-2: {bad} bytes are missing")
            held.region.revoke().wait(PATIENCE_S)
        self._met += len(self._held)
        self._held.clear()
        return wrong

    def measure(self) -> Sample:
        deadline = time.monotonic() + SETTLED_S
        while self._engine.stats()["retiring"] and time.monotonic() < deadline:
            time.sleep(0.02)
        return sample(self._began, self._met)


class Decoding:
    """A decoder and its requests."""

    def __init__(self, transport: str, side: Side) -> None:
        self._decoder = DecoderProcess("d", transport, side)
        self._began, self._asked = time.monotonic(), 0

    def ask(self, asks: Sequence[Ask], offer: bytes) -> list[Came]:
        self._asked += len(asks)
        return self._decoder.run(asks, {asks[0].prefiller: offer}, time.monotonic())

    def settle(self) -> list[str]:
        return _settled(self._decoder)

    def measure(self) -> Sample:
        return sample(self._began, 0)


class Prefilling:
    """A prefiller."""

    def __init__(self, transport: str, side: Side) -> None:
        self._prefiller = PrefillerProcess("p", transport, side)
        self._began = time.monotonic()

    def offer(self) -> bytes:
        return self._prefiller.prefiller.offer()

    def settle(self) -> list[str]:
        return _settled(self._prefiller)

    def measure(self) -> Sample:
        return sample(self._began, 0)


def _settled(end: DecoderProcess | PrefillerProcess) -> list[str]:
    deadline = time.monotonic() + PATIENCE_S
    while not end.idle:
        if time.monotonic() > deadline:
            return [*end.wrong(), f"leak: pages are taken {PATIENCE_S} s after the round"]
        time.sleep(0.005)
    return end.wrong()
