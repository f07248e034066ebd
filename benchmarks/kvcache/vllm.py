"""Time to first token, goodput and CPU time of vLLM servers: a plain one, and pairs of a prefiller
and a decoder by this project's connector and by vLLM's own NIXL connector.

Every turn gives each setup the same number of new prompts, in an order that rotates. Prompts are
random, so that no prefix cache has any of their blocks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import msgspec

from benchmarks.kvcache.vllm_setups import BLOCK, FLOOR, NIXL, Answer, Concurrent, Setup
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError, Failure, Row, RowHeader, make_figure, make_row
from fabric_ray.bench.turns import rotated
from tests.adapters.vllm.router import random_prompt

METRICS = ("ttft", "goodput", "cpu")
IDLE = "vllm-idle/cpu of a second"
_WARM_UP = 2
"""Requests of each turn before the clock starts."""


class Load(msgspec.Struct, frozen=True):
    """What one row is of."""

    length: int
    """Tokens of a prompt."""
    concurrent: int
    """Requests at a time; as one is answered, the next is sent."""
    requests: int
    """Of a turn."""

    def key(self, metric: str, handoff: str) -> str:
        return f"vllm-{metric}/{self.length} tokens x {self.concurrent}, {handoff}"


class Turn(msgspec.Struct, frozen=True):
    """One setup's requests in one turn, in seconds."""

    firsts: list[float]
    """Times to the first token."""
    seconds: float
    """Of all requests together."""
    cpu: float
    """Of all servers together."""
    step: float = 0.0
    """Between two tokens of one answer."""


Turns = Mapping[str, Sequence[Turn]]


def loads(lengths: Sequence[int], concurrent: Sequence[int], requests: int) -> list[Load]:
    """Every length at every concurrency. A turn has ``requests``, more where more run at once, so
    that its last ones, which have the servers for themselves, are few."""
    return [
        Load(length, at_once, max(requests, 3 * at_once))
        for length, at_once in product(lengths, concurrent)
    ]


def measure(
    setups: Sequence[Setup],
    wanted: Sequence[Load],
    turns: int,
    results: Results,
    *,
    tokens: int,
    block_bytes: int,
    idle: float,
) -> None:
    """Rows of every load, then of servers that have nothing to do. Setups whose tokens aren't the
    plain server's are failed.

    Args:
        setups: the plain one first; all of their servers run.
        tokens: of each answer.
        block_bytes: of a block of the KV cache.
        idle: seconds of a turn without requests.

    Raises:
        ContenderError: the plain server fails.
    """
    for setup in setups:
        setup.pause()
    results.say("comparing tokens")
    wrong = _wrong(setups, sorted({load.length for load in wanted}), tokens)
    for number, load in enumerate(wanted):
        if not results.has(*(load.key(m, h) for m, h in product(METRICS, _handoffs(setups)))):
            results.say(f"{number + 1}/{len(wanted)} {load.length} tokens x {load.concurrent}")
            _measure_load(setups, load, turns, results, tokens, block_bytes, wrong)
    if not results.has(IDLE):
        results.say("idle servers")
        _measure_idle(
            [setup for setup in setups if setup.name not in wrong],
            turns,
            results,
            idle,
        )


def _handoffs(setups: Sequence[Setup]) -> list[str]:
    return [setup.handoff for setup in _subjects(setups)]


def _subjects(setups: Sequence[Setup]) -> list[Setup]:
    """Those that have rows: ours, or the peers where ours doesn't run."""
    ours = [setup for setup in setups if setup.family == "ours"]
    return ours or [setup for setup in setups if setup.family == "peer"]


def _wrong(setups: Sequence[Setup], lengths: Sequence[int], tokens: int) -> dict[str, str]:
    """Why setups aren't measured, by their names. These requests warm all servers up, and connect
    decoders with their prefillers."""
    plain, *others = setups
    # Two setups may share their servers, so each has prompts of its own.
    prompts = {setup.name: _samples(setup.name, lengths) for setup in others}
    expected = {name: _answers(plain, each, tokens) for name, each in prompts.items()}
    wrong: dict[str, str] = {}
    for setup in others:
        try:
            found = _answers(setup, prompts[setup.name], tokens)
        except ContenderError as error:
            wrong[setup.name] = str(error)
            continue
        pairs = zip(prompts[setup.name], expected[setup.name], found, strict=True)
        if bad := [len(prompt) for prompt, one, other in pairs if one != other]:
            wrong[setup.name] = f"other tokens than the plain server's, prompts of {bad} tokens"
    return wrong


def _samples(name: str, lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(name)
    prompts = [random_prompt(source, length) for length in (*lengths, 1, BLOCK, BLOCK + 1)]
    return [*prompts, prompts[-1] + random_prompt(source, 5)]


def _answers(setup: Setup, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    setup.resume()
    try:
        return [setup.answer(prompt, tokens).tokens for prompt in prompts]
    finally:
        setup.pause()


def _measure_load(
    setups: Sequence[Setup],
    load: Load,
    turns: int,
    results: Results,
    tokens: int,
    block_bytes: int,
    wrong: Mapping[str, str],
) -> None:
    failed = dict(wrong)
    found: dict[str, list[Turn]] = {setup.name: [] for setup in setups}
    complete = False
    try:
        for turn in range(turns):
            for setup in rotated(setups, turn):
                if setup.name in failed:
                    continue
                # Two setups may share their servers, whose caches keep what they have seen.
                source = random.Random(f"{load} {turn} {setup.name}")
                try:
                    found[setup.name].append(take_turn(setup, load, source, tokens))
                except ContenderError as error:
                    failed[setup.name] = str(error)
        complete = True
    finally:
        kept = {name: each for name, each in found.items() if name not in failed}
        if any(kept.values()) or complete:
            results.add(*rows(load, setups, kept, failed, block_bytes, complete=complete))


def take_turn(setup: Setup, load: Load, source: random.Random, tokens: int) -> Turn:
    """One turn of a setup that is paused before and after it.

    Raises:
        ContenderError: a request failed.
    """

    def ask(prompt: list[int]) -> Answer:
        return setup.answer(prompt, tokens)

    setup.resume()
    try:
        prompts = [random_prompt(source, load.length) for _ in range(load.requests + _WARM_UP)]
        for prompt in prompts[:_WARM_UP]:
            ask(prompt)
        with ThreadPoolExecutor(load.concurrent) as pool:
            cpu, start = setup.cpu(), time.monotonic()
            answers = list(pool.map(ask, prompts[_WARM_UP:]))
            seconds, used = time.monotonic() - start, setup.cpu() - cpu
    finally:
        setup.pause()
    steps = [(answer.seconds - answer.first) / max(1, tokens - 1) for answer in answers]
    return Turn([answer.first for answer in answers], seconds, used, statistics.median(steps))


def rows(
    load: Load,
    setups: Sequence[Setup],
    found: Turns,
    failed: Mapping[str, str],
    block_bytes: int,
    *,
    complete: bool,
) -> Iterator[Row]:
    """For each hand-off and each metric a row, beside all setups that aren't ours."""
    failures = [Failure(contender=name, reason=reason) for name, reason in failed.items()]
    of = {metric: _seconds(metric, load, found) for metric in METRICS}
    for one in _subjects(setups):
        beside = [setup for setup in setups if setup is one or setup.family != "ours"]
        for metric in METRICS:
            header = RowHeader(
                key=load.key(metric, one.handoff), unit="op/s" if metric == "goodput" else "ms"
            )
            taken = {
                setup: of[metric][setup.name] for setup in beside if of[metric].get(setup.name)
            }
            details: dict[str, dict[str, float | str]] = {
                setup.name: _tails(found[setup.name]) if metric == "ttft" else {} for setup in taken
            }
            if metric == "cpu":
                gigabytes = -(-load.length // BLOCK) * block_bytes / 1e9
                for setup in taken:
                    details[setup.name] = _per_gigabyte(of["cpu"], setup.name, gigabytes)
            if one in taken:
                details[one.name] |= _spread(of[metric], one.name)
                if metric == "ttft":
                    details[one.name] |= _of_plain_and_step(of[metric], found, one.name)
            figures = [
                make_figure(
                    header,
                    setup.name,
                    setup.family,
                    [[s] for s in each],
                    details=details[setup.name],
                )
                for setup, each in taken.items()
            ]
            named = {setup.name for setup in beside}
            lost = [failure for failure in failures if failure.contender in named]
            yield make_row(header, figures, lost, complete=complete)


def _seconds(metric: str, load: Load, found: Turns) -> dict[str, list[float]]:
    """A metric's figure of each turn, by setup: seconds, of one request."""
    if metric == "ttft":
        return {name: [statistics.median(t.firsts) for t in each] for name, each in found.items()}
    field = "seconds" if metric == "goodput" else "cpu"
    return {
        name: [getattr(turn, field) / load.requests for turn in each]
        for name, each in found.items()
    }


def _tails(turns: Sequence[Turn]) -> dict[str, float | str]:
    firsts = [first for turn in turns for first in turn.firsts]
    if len(firsts) < 2:
        return {}
    return {"P90 ms": 1e3 * statistics.quantiles(firsts, n=10, method="inclusive")[-1]}


def _spread(seconds: Mapping[str, Sequence[float]], mine: str) -> dict[str, float | str]:
    """The median of the turns' ratios, and between which they lie: more than 1 is ahead."""
    shown: dict[str, float | str] = {}
    for name in (FLOOR, NIXL):
        pairs = zip(seconds.get(name, ()), seconds[mine], strict=False)
        if ratios := [other / own for other, own in pairs if own > 0]:
            shown[f"over {name}"] = _median_and_range(ratios)
    return shown


def _of_plain_and_step(
    firsts: Mapping[str, Sequence[float]], found: Turns, mine: str
) -> dict[str, float | str]:
    """The ratios of the turns to the plain server's first token and one step of it. A decoder
    computes the last token of a prompt again, so less than 1 is by chance."""
    wanted = [
        first + turn.step
        for first, turn in zip(firsts.get(FLOOR, ()), found.get(FLOOR, ()), strict=True)
    ]
    ratios = [own / other for own, other in zip(firsts[mine], wanted, strict=False) if other > 0]
    return {"of plain and a step": _median_and_range(ratios)} if ratios else {}


def _median_and_range(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _per_gigabyte(
    cpu: Mapping[str, Sequence[float]], name: str, gigabytes: float
) -> dict[str, float | str]:
    """CPU time beyond the plain server's, which computes as much, of a gigabyte of KV pushed."""
    beyond = [own - plain for own, plain in zip(cpu[name], cpu.get(FLOOR, ()), strict=False)]
    if name == FLOOR or not beyond:
        return {}
    return {"beyond plain, s/GB": statistics.median(beyond) / gigabytes}


def _measure_idle(setups: Sequence[Setup], turns: int, results: Results, seconds: float) -> None:
    """CPU time that servers take within a second when they have nothing to do, after requests."""
    each = [setup for setup in setups if not isinstance(setup, Concurrent)]  # the same servers
    found: dict[str, list[float]] = {setup.name: [] for setup in each}
    complete = False
    try:
        for turn in range(turns):
            for setup in rotated(each, turn):
                found[setup.name].append(_idle(setup, seconds))
        complete = True
    finally:
        header = RowHeader(key=IDLE, unit="ms")
        figures = [
            make_figure(header, setup.name, setup.family, [[s] for s in found[setup.name]])
            for setup in each
            if found[setup.name]
        ]
        if figures:
            results.add(make_row(header, figures, complete=complete))


def _idle(setup: Setup, seconds: float) -> float:
    setup.resume()
    try:
        time.sleep(1.0)  # what was due while it was stopped
        cpu, start = setup.cpu(), time.monotonic()
        time.sleep(seconds)
        return (setup.cpu() - cpu) / (time.monotonic() - start)
    finally:
        setup.pause()
