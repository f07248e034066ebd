"""Which promises a round of transfers has broken, from what its processes said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.draw import Piece, Round
from tests.chaos.process_group import Gone, Stuck
from tests.chaos.reports import NO_ROOM, Ended, content

# Machines are busy: how much later than promised something may be seen to end.
MARGIN = 1.0
# RS-4: the time in which a death is told.
DEATH = 2.0

_LOST = {"PeerLost", "Unreachable", "RailLost", "HandshakeError"}
_LATE = {"TransferTimeout"}
_STALE = {"Stale", "Refused"}


@dataclass
class Said:
    """All that was said about a round."""

    ran: dict[int, Any]
    """By process: what it sent and what it heard, or an exception."""
    settled: dict[int, Any] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    """By process: when."""
    full: set[int] = field(default_factory=set)
    """Who has a full disk at all."""
    start: float = 0.0

    def sent(self) -> Iterator[tuple[int, Ended]]:
        for rank, each in self.ran.items():
            if not isinstance(each, Exception):
                yield from ((rank, ended) for ended in each[0])

    def heard(self) -> Iterator[tuple[int, Ended]]:
        for rank, each in self.ran.items():
            if not isinstance(each, Exception):
                yield from ((rank, ended) for ended in each[1])


def judge(stage: Round, said: Said) -> tuple[list[str], Counter[str]]:
    """The promises that were broken, and how often what came of transfers."""
    wrong = [w for each in (said.ran, said.settled) for w in _answers(each, said)]
    results: Counter[str] = Counter()
    pieces = {p.id: p for p in stage.pieces}
    for rank, ended in said.sent():
        if ended.id == NO_ROOM:
            wrong += _no_room(rank, ended)
            continue
        wrong += ended.wrong if ended.id >= 0 else ()
        if ended.id < 0:
            wrong += _ghost(stage, rank, ended)
            continue
        piece = pieces[ended.id]
        results[f"{piece.kind}: {ended.error or 'ok'}"] += 1
        quiet = {True: "yes", False: "not yet", None: "unknown"}[ended.quiesced]
        if ended.error is not None:
            results[f"quiesced: {quiet}"] += 1
        wrong += _transfer(stage, said, piece, ended)
    for rank, ended in said.heard():
        wrong += ended.wrong
        results[f"expectation: {ended.error or 'ok'}"] += 1
        wrong += _expectation(stage, said, rank, ended)
    for rank, each in said.settled.items():
        if not isinstance(each, Exception):
            found, (values, messages, kept) = each
            wrong += found
            wrong += _counts(stage, said, rank, values)
            wrong += _messages(stage, said, rank, messages)
            results["memory kept"] += kept
            if kept and not stage.faults:
                wrong.append(f"MR-1: w{rank} keeps {kept} regions though nothing went wrong")
    return wrong, results


def _answers(each: dict[int, Any], said: Said) -> Iterator[str]:
    for rank, answer in each.items():
        if isinstance(answer, Stuck):
            yield f"hang: w{rank} did not answer; it stands at\n{answer}"
        elif isinstance(answer, Gone):
            if rank not in said.killed:
                yield f"crash: w{rank} died without being killed"
        elif isinstance(answer, Exception):
            yield f"error: w{rank}: {type(answer).__name__}: {answer}"


def _ghost(stage: Round, rank: int, ended: Ended) -> Iterator[str]:
    short = {"ResourceError"} if stage.has("no_room") else set()
    if ended.error not in _LOST | _STALE | _LATE | short:
        yield (
            f"MR-2: w{rank} wrote to {ended.wrong[0]}, which was taken back: "
            f"{ended.error or 'success'} {ended.text}"
        )


def _no_room(rank: int, ended: Ended) -> Iterator[str]:
    if ended.error and not (ended.error == "ResourceError" and "ulimit -f" in ended.text):
        yield f"error: w{rank} asked for memory beyond its limit: {ended.error}: {ended.text}"


def _allowed(stage: Round, ranks: set[int]) -> set[str]:
    """Errors that a round's faults excuse."""
    errors: set[str] = set()
    if stage.has("kill") and ranks & stage.victims("kill"):
        errors |= _LOST
        if any(p.timeout < DEATH for p in stage.pieces):
            errors |= _LATE
    if stage.has("sleep") and ranks & stage.victims("sleep"):
        errors |= _LOST | _LATE
    if ranks & stage.victims("freeze"):
        errors |= _LATE
    if stage.has("reset"):
        errors |= _LOST
    if stage.impatient and stage.faults:
        # Who missed one write has taken the memory of others back as well.
        errors |= _STALE
    if stage.has("no_room"):
        errors |= {"ResourceError"} | _LOST
    return errors


def _transfer(stage: Round, said: Said, piece: Piece, ended: Ended) -> Iterator[str]:
    what = f"piece {piece.id} ({piece.kind} w{piece.actor} to w{piece.other})"
    took = ended.ended - ended.began
    if ended.error == "hang":
        yield f"IC-4: {what} never ended"
        return
    limit = piece.timeout + stage.frozen(piece.actor) + MARGIN
    if took > limit:
        yield f"IC-4: {what} ended after {took:.2f} s, {limit:.2f} s were allowed: {ended.text}"
    died = said.killed.get(piece.other)
    if died is not None:
        late = ended.ended - max(died, ended.began)
        if late > DEATH + stage.frozen(piece.actor) + MARGIN:
            yield f"RS-4: {what} ended {late:.2f} s after w{piece.other} died: {ended.text}"
    spilt = piece.spill and piece.other in said.full
    if spilt and ended.error is None:
        yield f"RS-1: {what} succeeded on a full disk"
    allowed = _allowed(stage, {piece.actor, piece.other})
    if stage.has("spill"):
        # A refused copy may cost its link, and the link's other work.
        allowed |= _LOST | {"Refused", "ResourceError"}
    if ended.error is not None and ended.error not in allowed:
        yield f"error: {what}: {ended.error}: {ended.text}"


def _expectation(stage: Round, said: Said, rank: int, ended: Ended) -> Iterator[str]:
    mine = [p for p in stage.pieces if (p.other, p.counter) == (rank, ended.id)]
    what = f"expectation {ended.id} at w{rank}"
    limit = max(p.timeout for p in mine) + stage.frozen(rank) + MARGIN
    took = ended.ended - ended.began
    if ended.error == "hang" or took > limit:
        yield f"IC-4: {what}: {ended.error} after {took:.2f} s, {limit:.2f} s were allowed"
        return
    deaths = [said.killed[p.actor] for p in mine if p.actor in said.killed]
    if deaths and ended.error is not None:
        late = ended.ended - max(min(deaths), ended.began)
        if late > DEATH + stage.frozen(rank) + MARGIN:
            yield f"RS-4: {what} ended {late:.2f} s after a writer died: {ended.text}"
    writes = {e.id: e for _, e in said.sent() if e.id >= 0}
    lost = [p for p in mine if p.id not in writes or writes[p.id].error is not None]
    if ended.error is None and any(p.id in writes and p.spill for p in lost):
        yield f"IC-2: {what} is full, but a write to it failed"
    allowed = _allowed(stage, {rank, *(p.actor for p in mine)})
    if lost:
        allowed |= _LATE | _LOST
    if ended.error is not None and ended.error not in allowed:
        yield f"error: {what}: {ended.error}: {ended.text}"


def _counts(stage: Round, said: Said, rank: int, values: dict[int, int]) -> Iterator[str]:
    """IC-1, IC-3, IC-4: all that was written; at least what succeeded where some failed."""
    outcomes = {e.id: e for _, e in said.sent() if e.id >= 0}
    for index, value in values.items():
        mine = [p for p in stage.pieces if (p.other, p.counter) == (rank, index)]
        most = sum(p.counts for p in mine if not (p.spill and rank in said.full))
        least = sum(p.counts for p in mine if p.id in outcomes and outcomes[p.id].error is None)
        if value > most:
            yield f"IC-3: counter {index} at w{rank} is at {value}, {most} were written"
        if value < least:
            yield f"IC-4: counter {index} at w{rank} is at {value}, {least} succeeded"


def _messages(stage: Round, said: Said, rank: int, messages: list[bytes]) -> Iterator[str]:
    outcomes = {e.id: e for _, e in said.sent() if e.id >= 0}
    sent = {p.id: content(stage, p) for p in stage.pieces if p.kind == "message"}
    for message in messages:
        if message not in sent.values():
            yield f"RS-1: w{rank} received a message that was not sent in this round"
    for piece in stage.pieces:
        if piece.kind == "message" and piece.other == rank:
            came = messages.count(sent[piece.id])
            least = 1 if piece.id in outcomes and outcomes[piece.id].error is None else 0
            if not least <= came <= 1:
                yield f"IC-3: message {piece.id} came {came} times at w{rank}, not {least} to 1"
