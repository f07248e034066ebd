"""A process with an engine: does its part of each round, and reports what it saw."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fabric_ray import EngineAddress, TransferEngine
from tests.chaos.belongings import Belongings, full_disk, in_use, spill_folder
from tests.chaos.draw import PEER_TIMEOUT, Round
from tests.chaos.places import Place, Spill
from tests.chaos.reports import Ended, Opened
from tests.chaos.transfers import Listening, Sending


class Worker:
    def __init__(self, rank: int, transport: str) -> None:
        self.rank, self.transport = rank, transport
        self.no_full_disk = full_disk()
        # A tcp receiver's own store to a page that can't be had ends the process.
        self.full = self.no_full_disk is None and transport == "shm"
        self.engine: TransferEngine | None = None
        self.parts: list[Any] = []
        self.places: dict[int, Place] = {}
        self.sources: dict[int, Place] = {}
        self.quiet: list[tuple[int, str, Place]] = []
        self.messages: list[bytes] = []
        self.counters: dict[int, Any] = {}
        self.stale: list[Any] = []
        self._warm_up()
        self.before = Belongings()

    def _warm_up(self) -> None:
        """Whatever is loaded and started once in a process."""
        with (
            TransferEngine(transport=self.transport) as a,
            TransferEngine(transport=self.transport) as b,
        ):
            b.receive(lambda message: None)
            source, target = a.register(bytearray(64)), b.alloc(64)
            there = a.import_region(target.descriptor())
            a.write(source, there).wait(10)
            a.send(there.peer, b"x").add_done_callback(lambda _: None)

    def open(self) -> Opened:
        self.engine = TransferEngine(
            name=f"w{self.rank}",
            transport=self.transport,
            peer_timeout=PEER_TIMEOUT,
            op_timeout=20.0,
        )
        self.engine.receive(lambda message: self.messages.append(message.data))
        return Opened(self.engine.address, self.full, self.no_full_disk)

    def close(self) -> tuple[list[str], int]:
        """Closes the engine; says what it left behind, and how much memory the process has."""
        assert self.engine is not None
        wrong = self._look(0)
        while self.parts:
            self.parts.pop().close()
        self.engine.close()
        self.engine = None
        self._forget()
        self.quiet.clear()
        self.stale.clear()
        if left := self.before.left(8.0):
            wrong = [*wrong, f"leak: after its engine was closed, {left}"]
        return wrong, in_use()

    def _forget(self) -> None:
        self.places, self.sources, self.counters = {}, {}, {}
        self.messages.clear()

    def prepare(self, stage: Round) -> tuple[dict[int, Any], dict[int, Any]]:
        """Makes room for a round: descriptors by transfer, references by counter."""
        self._forget()
        engine = self.engine
        assert engine is not None
        for piece in stage.pieces:
            if piece.kind == "message" or self.rank not in (piece.actor, piece.other):
                continue
            acts = self.rank == piece.actor
            if not acts and piece.spill and self.full:
                self.places[piece.id] = Spill(engine, piece, spill_folder())
                continue
            source = acts != piece.is_read
            mappable = piece.mappable[0 if acts else 1]
            ends = self.sources if source else self.places
            ends[piece.id] = Place(engine, stage, piece, source=source, mappable=mappable)
        # Numbers that no earlier round has used.
        plain = stage.number * 2 % (1 << 19)
        for index in {p.counter for p in stage.pieces if p.other == self.rank and p.counts}:
            assert index is not None
            self.counters[index] = (
                engine.plain_counter(plain + index) if stage.plain else engine.counter()
            )
        offers = {
            piece.id: (self.sources if piece.is_read else self.places)[piece.id].region.descriptor()
            for piece in stage.pieces
            if piece.other == self.rank and piece.kind != "message"
        }
        refs = {k: plain + k if stage.plain else c.ref for k, c in self.counters.items()}
        return offers, refs

    def run(
        self,
        stage: Round,
        offers: dict[int, Any],
        refs: dict[tuple[int, int], Any],
        addresses: dict[int, EngineAddress],
        start: float,
    ) -> tuple[list[Ended], list[Ended]]:
        """Sends what is to be sent and waits for what is to come; both ends' results."""
        assert self.engine is not None
        peers = {r: self.engine.peer(a) for r, a in addresses.items() if r != self.rank}
        listening = [
            Listening(self, stage, index, counter, peers)
            for index, counter in self.counters.items()
        ]
        sending = Sending(self, stage, offers, refs, peers, start)
        return sending.finish(), [each.finish() for each in listening]

    def settle(self, stage: Round, outcomes: dict[int, Ended | None]) -> tuple[list[str], Any]:
        """After all have ended: looks at every byte, takes the memory back, scribbles, looks again.

        Args:
            outcomes: what those said who asked for transfers; none of who died.
        """
        wrong: list[str] = []
        for id_, place in self.places.items():
            if place.piece.is_read:
                continue  # its reader has looked
            said = outcomes.get(id_)
            if place.scribbled:
                continue
            if said is not None and said.error is None:
                if what := place.whole():
                    wrong.append(f"RS-1: piece {id_} succeeded, but {what}")
                place.scribble()
            else:
                if what := place.torn():
                    wrong.append(f"RS-1: piece {id_} failed, and {what}")
                if said is not None and said.quiesced:
                    place.scribble()
        values = self._values(stage, outcomes)
        kept = 0
        for id_, place in (*self.places.items(), *self.sources.items()):
            if place.withdraw(1.0):
                if not place.source or not place.scribbled:
                    place.scribble()
                self.quiet.append((stage.number, f"piece {id_}", place))
            else:
                kept += 1
        time.sleep(0.003)
        wrong += self._look(stage.number)
        self._hear_out(stage, outcomes)
        self.stale = [offer for offer in self.stale if offer[0] >= stage.number - 2]
        return wrong, (values, list(self.messages), kept)

    def _values(self, stage: Round, outcomes: dict[int, Ended | None]) -> dict[int, int]:
        """What counters say, once what must be counted is."""
        values = {}
        for index, counter in self.counters.items():
            least = sum(
                p.counts
                for p in stage.pieces
                if (p.other, p.counter) == (self.rank, index)
                and (said := outcomes.get(p.id)) is not None
                and said.error is None
            )
            deadline = time.monotonic() + 1.0
            while counter.poll() < least and time.monotonic() < deadline:
                time.sleep(0.001)
            values[index] = counter.value
        return values

    def _hear_out(self, stage: Round, outcomes: dict[int, Ended | None]) -> None:
        """Callbacks run one after another: gives those of messages that were sent time to run."""
        least = sum(
            p.kind == "message"
            and p.other == self.rank
            and (said := outcomes.get(p.id)) is not None
            and said.error is None
            for p in stage.pieces
        )
        deadline = time.monotonic() + 1.0
        while len(self.messages) < least and time.monotonic() < deadline:
            time.sleep(0.001)

    def _look(self, number: int) -> list[str]:
        """MR-1: memory that was taken back stays as its owner left it."""
        wrong = []
        for when, what, place in self.quiet:
            if landed := place.disturbed():
                wrong.append(f"MR-1: {what} of round {when}, taken back: {landed}")
        self.quiet = [q for q in self.quiet if q[0] >= number - 1]
        return wrong


def main(
    connection: Connection,
    make: Callable[[int, str], Any],
    rank: int,
    transport: str,
    stacks: str,
) -> None:
    """Calls what comes over the pipe with what it makes, one after another, as an actor does."""
    if folder := os.environ.get("FABRIC_CHAOS_LOGS"):
        logging.basicConfig(
            filename=f"{folder}/{transport}-w{rank}-{os.getpid()}.log",
            level=logging.DEBUG,
            format="%(asctime)s %(message)s",
        )
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        # What was loaded stays: looking through it takes longer than a round.
        gc.collect()
        gc.freeze()
        worker = make(rank, transport)
        while True:
            try:
                number, function, args = connection.recv()
            except EOFError:
                return
            try:
                said = function(worker, *args)
            except Exception as error:  # for the other side to judge
                said = error
            connection.send((number, said))
            # An error holds on to the frames it came through, and these to an engine.
            said = args = None
