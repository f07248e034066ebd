"""Both ends of a round's transfers: what is asked for, and what is waited for."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import FabricError
from tests.chaos.draw import Piece, Round
from tests.chaos.places import Place
from tests.chaos.reports import GHOST, GRACE, NO_ROOM, Ended, content

if TYPE_CHECKING:
    from tests.chaos.worker import Worker


class Listening:
    """Waits for a counter; when it is full, looks at every byte at once (IC-2), then uses the
    memory for something else, so that whatever lands twice is seen (IC-3, MR-1)."""

    def __init__(
        self, worker: Worker, stage: Round, index: int, counter: Any, peers: dict[int, Any]
    ) -> None:
        pieces = [p for p in stage.pieces if (p.other, p.counter) == (worker.rank, index)]
        self._places = [worker.places[p.id] for p in pieces]
        self._stage, self._index = stage, index
        self._limit = max(p.timeout for p in pieces)
        writers = [peers[rank] for rank in sorted({p.actor for p in pieces})]
        self._began = time.monotonic()
        self._expected = counter.expect(
            sum(p.counts for p in pieces), writers=writers, timeout=self._limit
        )
        self._result: Ended | None = None
        self._frozen = stage.frozen(worker.rank)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        error = _wait(self._expected, self._limit + self._frozen + GRACE)
        ended = time.monotonic()
        wrong: list[str] = []
        if error is None:
            for place in self._places:
                if what := place.whole():
                    wrong.append(f"IC-2: counter full, but piece {place.piece.id}: {what}")
            for place in self._places:
                place.scribble()
        elif self._stage.impatient:
            for place in self._places:
                if place.withdraw(0.2):
                    place.scribble()
        self._result = Ended(self._index, *_named(error), self._began, ended, True, tuple(wrong))

    def finish(self) -> Ended:
        self._thread.join()
        assert self._result is not None
        return self._result


class Sending:
    """Asks for this worker's transfers, each at its moment, and sees them end."""

    def __init__(
        self,
        worker: Worker,
        stage: Round,
        offers: dict[int, Any],
        refs: dict[tuple[int, int], Any],
        peers: dict[int, Any],
        start: float,
    ) -> None:
        assert worker.engine is not None
        self._worker, self._stage, self._engine = worker, stage, worker.engine
        self._offers, self._refs, self._peers = offers, refs, peers
        self._frozen = stage.frozen(worker.rank)
        self._ends: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        self._asked: list[tuple[Piece, Any]] = []
        mine = [p for p in stage.pieces if p.actor == worker.rank]
        for piece in sorted(mine, key=lambda p: p.at):
            time.sleep(max(0.0, start + piece.at - time.monotonic()))
            self._begun[piece.id] = time.monotonic()
            try:
                transfer = self._ask(piece)
                transfer.add_done_callback(lambda _, id_=piece.id: self._note(id_))
            except FabricError as error:
                transfer = error
            self._asked.append((piece, transfer))
        self._refused = self._hoard() if worker.rank in stage.victims("no_room") else []
        self._ghosts = [self._haunt(offer) for offer in worker.stale[:1]]
        for piece in mine:
            if piece.kind != "message":
                worker.stale.append((stage.number, piece.id, offers[piece.id]))

    def _note(self, id_: int) -> None:
        self._ends[id_] = time.monotonic()

    def _ask(self, piece: Piece) -> Any:
        engine, limit = self._engine, piece.timeout
        if piece.kind == "message":
            peer = self._peers[piece.other]
            return engine.send(peer, content(self._stage, piece), timeout=limit)
        there = engine.import_region(self._offers[piece.id])
        here = self._end(piece)
        n, at = piece.page_nbytes, here.offset
        imm = None if piece.counter is None else self._refs[piece.other, piece.counter]
        paged, ends = here.pages(), {"src_offset": at, "dst_offset": at, "timeout": limit}
        back = Place.pages_of(piece, source=not here.source)
        match piece.kind:
            case "write":
                return engine.write(here.region, there, n, imm=imm, **ends)
            case "read":
                return engine.read(there, here.region, n, **ends)
            case "pages":
                return engine.write_pages(
                    n, here.region, paged, there, back, imm=imm, timeout=limit
                )
            case _:
                return engine.read_pages(n, there, back, here.region, paged, timeout=limit)

    def _end(self, piece: Piece) -> Any:
        ends = self._worker.places if piece.is_read else self._worker.sources
        return ends[piece.id]

    def _haunt(self, offer: tuple[int, int, Any]) -> tuple[str, Any]:
        """A write to memory that its owner took back in an earlier round (MR-2)."""
        number, id_, descriptor = offer
        what = f"piece {id_} of round {number}"
        try:
            there = self._engine.import_region(descriptor)
            source = self._engine.alloc(there.nbytes)
            return what, self._engine.write(source, there, timeout=5.0)
        except FabricError as error:
            return what, error

    def _hoard(self) -> list[Ended]:
        """Asks for memory where none may be had."""
        error: Exception | None = None
        try:
            self._engine.alloc(1 << 20)
        except FabricError as refused:
            error = refused
        now = time.monotonic()
        return [Ended(NO_ROOM, *_named(error), now, now)]

    def finish(self) -> list[Ended]:
        out = [self._finish(piece, transfer) for piece, transfer in self._asked]
        for what, transfer in self._ghosts:
            error = transfer
            if not isinstance(transfer, FabricError):
                error = _wait(transfer, 5.0 + self._frozen + GRACE)
            now = time.monotonic()
            out.append(Ended(GHOST, *_named(error), now, now, True, (what,)))
        return out + self._refused

    def _finish(self, piece: Piece, transfer: Any) -> Ended:
        begun = self._begun[piece.id]
        if isinstance(transfer, FabricError):
            # Nothing was sent.
            return Ended(piece.id, *_named(transfer), begun, begun)
        limit = begun + piece.timeout + self._frozen + GRACE - time.monotonic()
        error = _wait(transfer, max(0.0, limit))
        ended = self._ends.get(piece.id, time.monotonic())
        quiesced = transfer.wait_quiesced(0.3)
        wrong: list[str] = []
        if piece.kind != "message":
            here = self._end(piece)
            if piece.is_read and error is None and (what := here.whole()):
                wrong.append(f"RS-1: piece {piece.id} was read, but {what}")
            elif piece.is_read and error is not None and (what := here.torn()):
                wrong.append(f"RS-1: piece {piece.id} was not read, and {what}")
            if error is None or quiesced:
                # Whatever is still to be sent of it would be sent wrong now, and seen.
                here.scribble()
        return Ended(piece.id, *_named(error), begun, ended, quiesced, tuple(wrong))


def _wait(transfer: Any, limit: float) -> Exception | None:
    """How it ended; a plain TimeoutError if it didn't."""
    try:
        transfer.wait(limit)
    except Exception as error:
        return error
    return None


def _named(error: Exception | None) -> tuple[str | None, str]:
    if error is None:
        return None, ""
    name = type(error).__name__
    return ("hang" if name == "TimeoutError" else name), str(error)
