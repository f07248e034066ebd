"""Engines that come, do a bit of everything with one that stays, and go."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from fabric_ray import Batch, TransferEngine, pages
from fabric_ray.errors import FabricError, Stale
from tests.soak.residents import PAGE, PAGES, PATIENCE_S, Offer, sample
from tests.soak.trend import Sample

AT_ONCE = 4


class Visitors:
    """A process in which engines live for one visit each."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._began, self._visits = time.monotonic(), 0

    def visit(self, offers: Sequence[Offer], seed: int) -> list[tuple[int, list[str]]]:
        """Of each visit, how many pages arrived, and what was wrong."""
        self._visits += len(offers)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._one, offers, range(seed, seed + len(offers))))

    def _one(self, offer: Offer, seed: int) -> tuple[int, list[str]]:
        draw, wrong = random.Random(seed), []
        half = PAGES // 2
        with TransferEngine(
            name="visitor", transport=self._transport, op_timeout=PATIENCE_S
        ) as engine:
            src, back = engine.alloc(PAGE * half), engine.alloc(PAGE * half)
            src.numpy()[:] = 7
            there = engine.import_region(offer.lasting)
            order = draw.sample(range(half), half)
            engine.write_pages(
                PAGE,
                src,
                pages(order, stride=PAGE),
                there,
                pages(order, stride=PAGE),
                imm=offer.counter,
            ).wait()
            engine.send(there.peer, draw.randbytes(draw.randrange(1, 2000))).wait()
            batch = Batch()
            batch.read(there, back)
            engine.submit(batch).wait()
            if (back.numpy() != 7).any():
                wrong.append("RS-1: what was read isn't what was written")
            wrong += self._brief(engine, offer)
            if draw.random() < 0.3:
                # Something is under way at the end.
                engine.write(src, engine.import_region(offer.pages), PAGE)
        return half, wrong

    def _brief(self, engine: TransferEngine, offer: Offer) -> list[str]:
        """Uses a grant until it ends by itself."""
        there, src = engine.import_region(offer.brief), engine.alloc(PAGE)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                engine.write(src, there, PAGE).wait()
            except Stale:
                return []
            except FabricError as error:
                return [f"MR-2: a grant ended with {error!r}"]
            time.sleep(0.01)
        return ["MR-2: a grant doesn't end"]

    def measure(self) -> Sample:
        return sample(self._began, 0)


def doomed(connection: Connection, transport: str, offer: Offer) -> None:
    """Writes until it is killed; says when it has begun."""
    engine = TransferEngine(name="doomed", transport=transport)
    src, there = engine.alloc(PAGE * PAGES), engine.import_region(offer.pages)
    engine.write(src, there).wait()
    connection.send(threading.get_native_id())
    while True:
        writes = [engine.write(src, there) for _ in range(8)]
        for write in writes:
            write.wait()
