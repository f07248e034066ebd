"""What a round of requests does, drawn from its number and the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.chaos.draw import Fault, FaultKind

# Ranks of processes: the first of each kind is never killed, so that what leaks has time to show.
DECODERS, PREFILLERS = (0, 1), (2, 3)
PROCESSES = (*DECODERS, *PREFILLERS)
ELDERS = (DECODERS[0], PREFILLERS[0])

BEAT, SILENCE = 0.2, 2.0
# Of requests that aren't hasty: beyond all that a round may do to them.
TIMEOUT = 20.0
TAIL = 192

LAYERS, HEADS, WIDTH = 3, 4, 16
ELEMENT = 8
MOST_TOKENS = 480


@dataclass(frozen=True)
class Side:
    """How the caches of one kind of process are made, for as long as their engines live."""

    ranks: int
    page_tokens: int
    tokens_first: bool

    @property
    def pages(self) -> int:
        """Room for all requests that a process may have, and for those whose memory is held."""
        return 24 * -(-MOST_TOKENS // self.page_tokens)


@dataclass(frozen=True)
class Ask:
    """One request for pages."""

    id: int
    key: tuple[object, ...]
    """What makes its bytes its own."""
    decoder: int
    prefiller: int
    tokens: int
    have: int
    """Tokens whose pages the decoder has: whole pages."""
    salt: int
    at: float
    """Seconds after the round's start."""
    timeout: float
    cancel: float | None
    """Seconds after it was made until it is cancelled."""
    chunk: int
    """Tokens that the prefiller computes in a pass."""
    pause: float
    """Seconds that a layer takes to compute."""
    fails: int | None
    """The pass in which the prefiller's engine gives up."""

    @property
    def hasty(self) -> bool:
        return self.timeout < TIMEOUT

    @property
    def reason(self) -> str:
        """What the prefiller says when its engine gives up."""
        return f"request {self.id} was too much for pass {self.fails}"


@dataclass(frozen=True)
class KvRound:
    number: int
    faults: tuple[Fault, ...]
    asks: tuple[Ask, ...]


_WEIGHTED: dict[tuple[FaultKind, ...], int] = {
    (): 30,
    ("kill",): 26,
    ("freeze",): 16,
    ("sleep",): 3,
    ("kill", "kill"): 6,
    ("freeze", "kill"): 6,
    ("freeze", "freeze"): 4,
    ("reset",): 9,
}


def sides(seed: int, transport: str, number: int) -> tuple[Side, Side]:
    """Caches of decoders and of prefillers, from a round on."""
    rng = random.Random(f"{seed}/{transport}/kv/{number}/sides")

    def side() -> Side:
        return Side(rng.choice((1, 2)), rng.choice((4, 8, 16, 48)), rng.random() < 0.4)

    return side(), side()


def draw(seed: int, transport: str, number: int, page_tokens: int) -> KvRound:
    """Round ``number`` of a run, for decoders with such pages."""
    rng = random.Random(f"{seed}/{transport}/kv/{number}")
    kinds = rng.choices(list(_WEIGHTED), list(_WEIGHTED.values()))[0]
    faults = tuple(_fault(rng, kind) for kind in kinds)
    count = rng.randint(6, 20)
    asks = tuple(_ask(rng, (seed, transport, number, i), i, page_tokens) for i in range(count))
    return KvRound(number, faults, asks)


def _fault(rng: random.Random, kind: FaultKind) -> Fault:
    victim = rng.choice(PROCESSES)
    if kind == "kill":
        victim = rng.choice([rank for rank in PROCESSES if rank not in ELDERS])
    at = rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.2)))
    lasts = {
        "freeze": rng.uniform(0.05, 0.35 * SILENCE),
        "sleep": rng.uniform(1.2, 1.6) * SILENCE,
    }
    return Fault(kind, victim, at, lasts.get(kind, 0.0))


def _ask(rng: random.Random, key: tuple[object, ...], id_: int, page_tokens: int) -> Ask:
    tokens = rng.choice((1, rng.randint(1, 64), rng.randint(1, MOST_TOKENS)))
    known = rng.randrange(tokens) // page_tokens * page_tokens if rng.random() < 0.3 else 0
    chunk = rng.choice((tokens, rng.randint(1, tokens)))
    passes = -(-(tokens - known) // chunk)
    if passes > 12:
        chunk = -(-(tokens - known) // 12)
        passes = -(-(tokens - known) // chunk)
    wish = rng.random()
    soon = rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.1)))
    return Ask(
        id=id_,
        key=key,
        decoder=rng.choice(DECODERS),
        prefiller=rng.choice(PREFILLERS),
        tokens=tokens,
        have=known,
        salt=rng.randrange(1 << 32),
        at=rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.15))),
        timeout=rng.uniform(0.001, 0.1) if 0.2 < wish < 0.35 else TIMEOUT,
        cancel=soon if wish < 0.2 else None,
        chunk=chunk,
        pause=rng.choice((0.0, 0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.01))),
        fails=rng.randrange(passes) if 0.35 < wish < 0.45 else None,
    )
