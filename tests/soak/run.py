"""A soak over one transport: rounds until the time is over, samples between them, trends."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.kv.draw import DECODERS, PREFILLERS, TIMEOUT, KvRound, Side, draw
from tests.chaos.kv.judge import judge
from tests.processes import Other
from tests.soak.residents import Decoding, Hub, Prefilling, resident
from tests.soak.trend import Sample, Trend, trends
from tests.soak.visitors import Visitors, doomed

VISITORS = 8
ANSWER_S = 180.0
SIDES = Side(1, 16, False), Side(2, 8, True)
# Between two kills: a process that starts takes as long as many rounds.
KILL_EVERY_S = 20.0


@dataclass
class Outcome:
    """What came of a soak."""

    transport: str
    seconds: float = 0.0
    rounds: int = 0
    visits: int = 0
    requests: int = 0
    kills: int = 0
    broken: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def trends(self) -> list[Trend]:
        return [t for name, samples in self.samples.items() for t in trends(name, samples)]

    @property
    def failed(self) -> bool:
        return bool(self.broken) or any(t.grows for t in self.trends())


class Soak:
    """Processes that stay, visited and asked for pages round after round."""

    def __init__(self, transport: str, seed: int) -> None:
        self._transport, self._seed = transport, seed
        self.outcome = Outcome(transport)
        self._processes: dict[str, Other] = {}
        makes: dict[str, tuple[Any, ...]] = {
            "hub": (Hub, transport),
            "visitors": (Visitors, transport),
            "decoder": (Decoding, transport, SIDES[0]),
            "prefiller": (Prefilling, transport, SIDES[1]),
        }
        for name, make in makes.items():
            self._processes[name] = Other(resident, *make)
        for process in self._processes.values():
            process.hear(ANSWER_S)
        self._killed_at = time.monotonic()

    def play(self, seconds: float, told: Callable[[float], None] = lambda _: None) -> Outcome:
        """Rounds for so long, and at least some."""
        began, sampled, every = time.monotonic(), 0.0, max(0.2, seconds / 120)
        try:
            while (passed := time.monotonic() - began) < seconds or self.outcome.rounds < 8:
                self._round()
                if passed - sampled >= every or self.outcome.rounds <= 8:
                    sampled = passed
                    self._sample()
                told(passed)
        finally:
            for process in self._processes.values():
                process.__exit__()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _ask(self, name: str, method: str, *args: Any) -> Any:
        return self._processes[name].ask((method, args), ANSWER_S)

    def _round(self) -> None:
        number, out = self.outcome.rounds, self.outcome
        offers = self._ask("hub", "offer", VISITORS + 1)
        written: list[int | None] = []
        for pages, wrong in self._ask("visitors", "visit", offers[:-1], number * VISITORS):
            written.append(pages)
            out.broken += wrong
        if time.monotonic() - self._killed_at > KILL_EVERY_S:
            self._killed_at = time.monotonic()
            with Other(doomed, self._transport, offers[-1]) as other:
                other.hear(ANSWER_S)
                time.sleep(random.Random(number).random() / 20)
                other.kill()
            out.kills += 1
        out.broken += self._ask("hub", "settle", [*written, None])
        out.rounds += 1
        out.visits += VISITORS
        self._pages(number)

    def _pages(self, number: int) -> None:
        stage = draw(self._seed, self._transport, number, SIDES[0].page_tokens)
        asks = tuple(
            dataclasses.replace(ask, id=i, decoder=DECODERS[0], prefiller=PREFILLERS[0])
            for i, ask in enumerate(stage.asks)
            # What is late on a busy machine says nothing here.
            if ask.timeout == TIMEOUT
        )
        if not asks:
            return
        offer = self._ask("prefiller", "offer")
        came = self._ask("decoder", "ask", asks, offer)
        wrong, _ = judge(KvRound(number, (), asks), {DECODERS[0]: came}, disturbed=False)
        for name in ("decoder", "prefiller"):
            wrong += self._ask(name, "settle")
        self.outcome.broken += [f"round {number}: {what}" for what in wrong]
        self.outcome.requests += len(asks)

    def _sample(self) -> None:
        for name in self._processes:
            self.outcome.samples.setdefault(name, []).append(self._ask(name, "measure"))
