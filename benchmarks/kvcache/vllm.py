"""Time to first token, goodput and CPU time of vLLM servers: a plain one, and pairs of a prefiller
and a decoder by this project's connector and by vLLM's own NIXL connector.

Every turn gives each way the same number of new prompts, in an order that rotates. Prompts are
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

from benchmarks.harness.contender import ContenderError
from benchmarks.harness.record import Results
from benchmarks.harness.results import Failure, Row, RowHeader, make_figure, make_row
from benchmarks.harness.schedule import rotated
from benchmarks.kvcache.vllm_ways import BLOCK, FLOOR, NIXL, Answer, Concurrent, Way
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
    """One way's requests in one turn, in seconds."""

    firsts: list[float]
    """Times to the first token."""
    seconds: float
    """Of all requests together."""
    cpu: float
    """Of all servers together."""


Turns = Mapping[str, Sequence[Turn]]


def loads(lengths: Sequence[int], concurrent: Sequence[int], requests: int) -> list[Load]:
    """Every length at every concurrency. A turn has ``requests``, more where more run at once, so
    that its last ones, which have the servers for themselves, are few."""
    return [
        Load(length, at_once, max(requests, 3 * at_once))
        for length, at_once in product(lengths, concurrent)
    ]


def measure(
    ways: Sequence[Way],
    wanted: Sequence[Load],
    turns: int,
    results: Results,
    *,
    tokens: int,
    block_bytes: int,
    idle: float,
) -> None:
    """Rows of every load, then of servers that have nothing to do. Ways whose tokens aren't the
    plain server's are failed.

    Args:
        ways: the plain one first; all of their servers run.
        tokens: of each answer.
        block_bytes: of a block of the KV cache.
        idle: seconds of a turn without requests.

    Raises:
        ContenderError: the plain server fails.
    """
    for way in ways:
        way.pause()
    results.say("comparing tokens")
    wrong = _wrong(ways, sorted({load.length for load in wanted}), tokens)
    for number, load in enumerate(wanted):
        if not results.has(*(load.key(m, h) for m, h in product(METRICS, _handoffs(ways)))):
            results.say(f"{number + 1}/{len(wanted)} {load.length} tokens x {load.concurrent}")
            _measure_load(ways, load, turns, results, tokens, block_bytes, wrong)
    if not results.has(IDLE):
        results.say("idle servers")
        _measure_idle([way for way in ways if way.name not in wrong], turns, results, idle)


def _handoffs(ways: Sequence[Way]) -> list[str]:
    return [way.handoff for way in ways if way.family == "ours"]


def _wrong(ways: Sequence[Way], lengths: Sequence[int], tokens: int) -> dict[str, str]:
    """Why ways aren't measured, by their names. These requests warm all servers up, and connect
    decoders with their prefillers."""
    plain, *others = ways
    # Two ways may share their servers, so each has prompts of its own.
    prompts = {way.name: _samples(way.name, lengths) for way in others}
    expected = {name: _answers(plain, each, tokens) for name, each in prompts.items()}
    wrong: dict[str, str] = {}
    for way in others:
        try:
            found = _answers(way, prompts[way.name], tokens)
        except ContenderError as error:
            wrong[way.name] = str(error)
            continue
        pairs = zip(prompts[way.name], expected[way.name], found, strict=True)
        if bad := [len(prompt) for prompt, one, other in pairs if one != other]:
            wrong[way.name] = f"other tokens than the plain server's, prompts of {bad} tokens"
    return wrong


def _samples(name: str, lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(name)
    prompts = [random_prompt(source, length) for length in (*lengths, 1, BLOCK, BLOCK + 1)]
    return [*prompts, prompts[-1] + random_prompt(source, 5)]


def _answers(way: Way, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    way.resume()
    try:
        return [way.answer(prompt, tokens).tokens for prompt in prompts]
    finally:
        way.pause()


def _measure_load(
    ways: Sequence[Way],
    load: Load,
    turns: int,
    results: Results,
    tokens: int,
    block_bytes: int,
    wrong: Mapping[str, str],
) -> None:
    failed = dict(wrong)
    found: dict[str, list[Turn]] = {way.name: [] for way in ways}
    complete = False
    try:
        for turn in range(turns):
            for way in rotated(ways, turn):
                if way.name in failed:
                    continue
                # Two ways may share their servers, whose caches keep what they have seen.
                source = random.Random(f"{load} {turn} {way.name}")
                try:
                    found[way.name].append(take_turn(way, load, source, tokens))
                except ContenderError as error:
                    failed[way.name] = str(error)
        complete = True
    finally:
        kept = {name: each for name, each in found.items() if name not in failed}
        if any(kept.values()) or complete:
            results.add(*rows(load, ways, kept, failed, block_bytes, complete=complete))


def take_turn(way: Way, load: Load, source: random.Random, tokens: int) -> Turn:
    """One turn of a way that is paused before and after it.

    Raises:
        ContenderError: a request failed.
    """

    def ask(prompt: list[int]) -> Answer:
        return way.answer(prompt, tokens)

    way.resume()
    try:
        prompts = [random_prompt(source, load.length) for _ in range(load.requests + _WARM_UP)]
        for prompt in prompts[:_WARM_UP]:
            ask(prompt)
        with ThreadPoolExecutor(load.concurrent) as pool:
            cpu, start = way.cpu(), time.monotonic()
            answers = list(pool.map(ask, prompts[_WARM_UP:]))
            seconds, used = time.monotonic() - start, way.cpu() - cpu
    finally:
        way.pause()
    return Turn([answer.first for answer in answers], seconds, used)


def rows(
    load: Load,
    ways: Sequence[Way],
    found: Turns,
    failed: Mapping[str, str],
    block_bytes: int,
    *,
    complete: bool,
) -> Iterator[Row]:
    """For each hand-off of ours and each metric a row, with all ways that aren't ours beside it."""
    failures = [Failure(contender=name, reason=reason) for name, reason in failed.items()]
    of = {metric: _seconds(metric, load, found) for metric in METRICS}
    for one in ways:
        if one.family != "ours":
            continue
        beside = [way for way in ways if way is one or way.family != "ours"]
        for metric in METRICS:
            header = RowHeader(
                key=load.key(metric, one.handoff), unit="op/s" if metric == "goodput" else "ms"
            )
            taken = {way: of[metric][way.name] for way in beside if of[metric].get(way.name)}
            details: dict[str, dict[str, float | str]] = {
                way.name: _tails(found[way.name]) if metric == "ttft" else {} for way in taken
            }
            if metric == "cpu":
                gigabytes = -(-load.length // BLOCK) * block_bytes / 1e9
                for way in taken:
                    details[way.name] = _per_gigabyte(of["cpu"], way.name, gigabytes)
            if one in taken:
                details[one.name] |= _spread(of[metric], one.name)
            figures = [
                make_figure(
                    header, way.name, way.family, [[s] for s in each], details=details[way.name]
                )
                for way, each in taken.items()
            ]
            named = {way.name for way in beside}
            lost = [failure for failure in failures if failure.contender in named]
            yield make_row(header, figures, lost, complete=complete)


def _seconds(metric: str, load: Load, found: Turns) -> dict[str, list[float]]:
    """A metric's figure of each turn, by way: seconds, of one request."""
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
    """Between which ratios the turns lie: more than 1 is ahead."""
    shown: dict[str, float | str] = {}
    for name in (FLOOR, NIXL):
        pairs = zip(seconds.get(name, ()), seconds[mine], strict=False)
        if ratios := [other / own for other, own in pairs if own > 0]:
            shown[f"over {name}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return shown


def _per_gigabyte(
    cpu: Mapping[str, Sequence[float]], name: str, gigabytes: float
) -> dict[str, float | str]:
    """CPU time beyond the plain server's, which computes as much, of a gigabyte of KV pushed."""
    beyond = [own - plain for own, plain in zip(cpu[name], cpu.get(FLOOR, ()), strict=False)]
    if name == FLOOR or not beyond:
        return {}
    return {"beyond plain, s/GB": statistics.median(beyond) / gigabytes}


def _measure_idle(ways: Sequence[Way], turns: int, results: Results, seconds: float) -> None:
    """CPU time that servers take within a second when they have nothing to do, after requests."""
    each = [way for way in ways if not isinstance(way, Concurrent)]  # the same servers
    found: dict[str, list[float]] = {way.name: [] for way in each}
    complete = False
    try:
        for turn in range(turns):
            for way in rotated(each, turn):
                found[way.name].append(_idle(way, seconds))
        complete = True
    finally:
        header = RowHeader(key=IDLE, unit="ms")
        figures = [
            make_figure(header, way.name, way.family, [[s] for s in found[way.name]])
            for way in each
            if found[way.name]
        ]
        if figures:
            results.add(make_row(header, figures, complete=complete))


def _idle(way: Way, seconds: float) -> float:
    way.resume()
    try:
        time.sleep(1.0)  # what was due while it was stopped
        cpu, start = way.cpu(), time.monotonic()
        time.sleep(seconds)
        return (way.cpu() - cpu) / (time.monotonic() - start)
    finally:
        way.pause()
