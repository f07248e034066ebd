"""What a round does, drawn from its number and the seed alone: no clock, no process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

WORKERS = 4
# Never killed, so that what leaks has time to show.
ELDER = 0
TRAINERS, ROLLOUTS = (0, 1), (2, 3)
PEER_TIMEOUT = 1.0

Kind = Literal["write", "pages", "read", "read_pages", "message"]
FaultKind = Literal["kill", "freeze", "sleep", "reset", "spill", "no_room"]
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Piece:
    """One transfer."""

    id: int
    kind: Kind
    actor: int
    """Who asks for it."""
    other: int
    """Whose memory it reaches."""
    page_nbytes: int
    page_count: int
    counter: int | None
    """Which of the other's counters it counts on."""
    at: float
    """Seconds after the start of the round."""
    timeout: float
    mappable: tuple[bool, bool]
    """Whether the engine allocated the memory: the actor's, the other's."""
    spill: bool = False
    """The other's memory is a file on a full disk."""

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.page_count

    @property
    def is_read(self) -> bool:
        return self.kind in ("read", "read_pages")

    @property
    def counts(self) -> int:
        """IC-1: one for a write, one for each page."""
        if self.counter is None:
            return 0
        return self.page_count if self.kind == "pages" else 1


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    victim: int
    at: float
    lasts: float = 0.0


@dataclass(frozen=True)
class Round:
    number: int
    names: tuple[object, ...]
    """What makes its bytes its own."""
    kind: Literal["transfers", "weights"]
    faults: tuple[Fault, ...]
    pieces: tuple[Piece, ...] = ()
    plain: bool = False
    """Counters behind pre-agreed integers rather than those that are handed out."""
    impatient: bool = False
    """Who misses writes takes its memory back at once, not when the round is over."""
    reconnect: bool = False
    """Another controller takes over, in the middle of what goes wrong."""

    def has(self, *kinds: FaultKind) -> bool:
        return any(f.kind in kinds for f in self.faults)

    def victims(self, *kinds: FaultKind) -> set[int]:
        return {f.victim for f in self.faults if f.kind in kinds}

    def frozen(self, rank: int) -> float:
        """Seconds that a process spends frozen."""
        return sum(f.lasts for f in self.faults if f.victim == rank and f.kind in _STOPS)


_STOPS: tuple[FaultKind, ...] = ("freeze", "sleep")
_WEIGHTED: dict[tuple[FaultKind, ...], int] = {
    (): 12,
    ("kill",): 20,
    ("freeze",): 10,
    ("sleep",): 5,
    ("reset",): 18,
    ("spill",): 6,
    ("no_room",): 6,
    ("reset", "reset"): 6,
    ("kill", "reset"): 5,
    ("kill", "kill"): 4,
    ("freeze", "reset"): 4,
    ("no_room", "reset"): 4,
    ("no_room", "kill"): 2,
    ("sleep", "kill"): 2,
}


def draw(seed: int, transport: str, number: int) -> Round:
    """Round ``number`` of a run."""
    rng = random.Random(f"{seed}/{transport}/{number}")
    kinds = rng.choices(list(_WEIGHTED), list(_WEIGHTED.values()))[0]
    weights = rng.random() < 0.3
    faults = tuple(_fault(rng, kind) for kind in kinds if not (weights and kind == "spill"))
    names = (seed, transport, number)
    if weights:
        return Round(number, names, "weights", faults, reconnect=rng.random() < 0.25)
    pieces = _pieces(rng, faults)
    return Round(
        number,
        names,
        "transfers",
        faults,
        pieces,
        plain=rng.random() < 0.3,
        impatient=rng.random() < 0.5,
    )


def _fault(rng: random.Random, kind: FaultKind) -> Fault:
    victim = rng.randrange(WORKERS)
    if kind == "kill" and victim == ELDER:
        victim = rng.randrange(1, WORKERS)
    # Most transfers are over within milliseconds; connecting takes some as well.
    at = rng.choice((0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.02), rng.uniform(0, 0.1)))
    lasts = {
        "freeze": rng.uniform(0.02, 0.4 * PEER_TIMEOUT),
        "sleep": rng.uniform(1.3, 1.9) * PEER_TIMEOUT,
        "no_room": 0.3,
    }
    return Fault(kind, victim, 0.0 if kind == "no_room" else at, lasts.get(kind, 0.0))


def _pieces(rng: random.Random, faults: tuple[Fault, ...]) -> tuple[Piece, ...]:
    spills = {f.victim for f in faults if f.kind == "spill"}
    stopped = any(f.kind in _STOPS for f in faults)
    # One large transfer at most: patterns of 64 MiB take longer to make than to send.
    large = rng.random() < 0.12
    pieces = []
    for number in range(rng.randint(6, 20)):
        actor = rng.randrange(WORKERS)
        other = rng.choice([rank for rank in range(WORKERS) if rank != actor])
        kind: Kind = rng.choices(
            ("write", "pages", "read", "read_pages", "message"), (40, 30, 12, 8, 10)
        )[0]
        page_count = 1
        nbytes = int(2 ** rng.uniform(0, 20))
        if kind in ("pages", "read_pages"):
            page_count = rng.choice((1, 2, 7, 32, 200))
            nbytes = rng.choice((8, 512, 4 * KIB, 16 * KIB))
        elif kind == "message":
            nbytes = rng.randint(1, 4 * KIB)
        elif large and number == 0:
            nbytes = rng.choice((4 * MIB, 16 * MIB, 64 * MIB))
        counted = kind in ("write", "pages") and rng.random() < 0.75
        pieces.append(
            Piece(
                number,
                kind,
                actor,
                other,
                nbytes,
                page_count,
                rng.randrange(2) if counted else None,
                at=rng.choice((0.0, 0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1))),
                timeout=rng.choice((0.3, 0.8, 2.5)) if stopped else 8.0,
                mappable=(rng.random() < 0.6, rng.random() < 0.6),
                spill=other in spills and kind in ("write", "pages"),
            )
        )
    return tuple(pieces)
