"""Many requests at once against prefillers that are killed: all end, none wrong, nothing leaks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from benchmarks.harness.child import Child
from benchmarks.harness.processes import adopt_orphans
from benchmarks.kvcache.nodes import Setup
from benchmarks.kvcache.serving import Ended, Order, Outcome
from benchmarks.sheets import Sheet, keeping, spread, verdict
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import tiny
from fabric_ray.inference.spec import CacheSpec

_PREFILLER = "benchmarks.kvcache.nodes:PrefillNode"
_DECODER = "benchmarks.kvcache.serving:LoadedDecoder"
_PAGE_TOKENS = 16
_PREFILL_PAGES = 512
_LOOK_S = 0.05
_SETTLE_S = 20.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a deployment."""

    requests: int = 3000
    concurrent: int = 1000
    cancelled: float = 0.1
    """Share of requests whose clients go away."""
    patience: float = 4.0
    """Seconds after which they do, at most; drawn evenly."""
    kill_every: float = 10.0
    """Seconds from one killed prefiller to the next."""
    kills: int | None = None
    """Prefillers that are killed at most."""
    prefillers: int = 2
    decoders: int = 2
    prompt_tokens: tuple[int, int] = (16, 256)
    max_tokens: tuple[int, int] = (4, 16)
    distinct: int = 200
    """Prompts; requests draw from them."""
    limit: float = 600.0
    """Seconds until the run is given up."""
    preset: str = "tiny-llama"
    seed: int = 1


class Outcomes(msgspec.Struct, kw_only=True):
    """What became of all requests."""

    ended: list[Ended] = []
    wrong: list[int] = []
    """Numbers of requests whose tokens aren't the reference's."""
    seconds: float = 0.0
    killed: int = 0
    leaked: list[str] = []
    """Processes that hold pages, slots or requests when all is over."""
    alone: float = 0.0
    """Requests a second of one process that isn't disaggregated."""


def _child(maker: str, *arguments: Any) -> Child:
    return Child(maker, *arguments, env={"OMP_NUM_THREADS": "1"})


class _Deployment:
    """The processes, and those that replace killed ones."""

    def __init__(self, load: Load, setup: Setup, slots: int) -> None:
        self._setup = setup
        self._count = 0
        self.starting: list[Child] = []
        self.prefillers: list[Child] = []
        self.decoders: list[Child] = []
        try:
            for number in range(load.decoders):
                spec = msgspec.structs.replace(setup.spec, pages=_decode_pages(load))
                own = msgspec.structs.replace(setup, spec=spec)
                self.decoders.append(_child(_DECODER, own, f"decoder-{number}", slots))
            for _ in range(load.prefillers):
                self.start()
            for decoder in self.decoders:
                decoder.end_call()
            while self.starting:
                self.admit()
                time.sleep(_LOOK_S)
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        """Another prefiller, which joins when it is up."""
        self._count += 1
        self.starting.append(_child(_PREFILLER, self._setup, f"prefiller-{self._count}"))

    def admit(self) -> None:
        """Lets the decoders meet prefillers that are up."""
        for child in [child for child in self.starting if child.answered()]:
            child.end_call()
            self.starting.remove(child)
            self.prefillers.append(child)
            offer = child.call("offer")
            for decoder in self.decoders:
                decoder.call("meet", offer)

    def kill_one(self) -> None:
        """The prefiller that has been there for longest."""
        self.prefillers.pop(0).kill()
        self.start()

    def leaks(self) -> list[str]:
        """Who still holds something, when there was time to give it back."""
        end = time.monotonic() + _SETTLE_S
        while True:
            states = [
                (child.name, child.call("state")) for child in (*self.decoders, *self.prefillers)
            ]
            held = [f"{kind}: {state}" for kind, state in states if not _is_empty(state)]
            if not held or time.monotonic() > end:
                return held
            time.sleep(_LOOK_S)

    def end(self) -> None:
        for child in (*self.decoders, *self.prefillers, *self.starting):
            child.kill()


def load(asked: Load, say: Callable[[str], None]) -> tuple[Sheet, Outcomes]:
    """Runs until all requests have ended."""
    adopt_orphans()
    config = tiny(asked.preset)
    spec = CacheSpec(page_tokens=_PAGE_TOKENS, pages=_PREFILL_PAGES)
    # Tokens must not depend on who is in a batch: float64 leaves no ties to rounding.
    setup = Setup(config, spec, "float64", chunk_tokens=asked.prompt_tokens[1])
    drawn = random.Random(asked.seed)
    distinct = min(asked.distinct, asked.requests)
    prompts = [_prompt(drawn, asked, config.vocab) for _ in range(distinct)]
    outcomes = Outcomes()
    say("the reference")
    reference = _reference(prompts, setup, outcomes)
    deployment = _Deployment(asked, setup, asked.concurrent)
    try:
        with keeping(lambda: _sheet(asked, outcomes)):
            _drive(asked, deployment, drawn, prompts, outcomes, say)
        outcomes.leaked = deployment.leaks()
    finally:
        deployment.end()
    for one in outcomes.ended:
        whole = reference[one.number % distinct]
        expected = whole if one.outcome == "done" else whole[: len(one.tokens)]
        if one.tokens != expected:
            outcomes.wrong.append(one.number)
    return _sheet(asked, outcomes), outcomes


def _prompt(drawn: random.Random, asked: Load, vocab: int) -> GenerationRequest:
    length = drawn.randint(*asked.prompt_tokens)
    prompt = [drawn.randrange(vocab) for _ in range(length)]
    return GenerationRequest(prompt, max_tokens=drawn.randint(*asked.max_tokens))


def _reference(
    prompts: list[GenerationRequest], setup: Setup, outcomes: Outcomes
) -> list[list[int]]:
    torch.set_num_threads(1)  # as in the deployment's processes
    model = Model.random(setup.config, dtype="float64")
    generator = Generator(TorchEngine(model, setup.spec), chunk_tokens=setup.chunk_tokens)
    start = time.monotonic()
    tokens = generator.run(prompts)
    outcomes.alone = len(prompts) / (time.monotonic() - start)
    return tokens


def _decode_pages(asked: Load) -> int:
    """Room for half of a decoder's share of the requests: the others wait for pages."""
    longest = -(-(asked.prompt_tokens[1] + asked.max_tokens[1]) // _PAGE_TOKENS)
    return max(longest, asked.concurrent // asked.decoders // 2 * longest)


def _drive(
    asked: Load,
    deployment: _Deployment,
    drawn: random.Random,
    prompts: list[GenerationRequest],
    outcomes: Outcomes,
    say: Callable[[str], None],
) -> None:
    start = time.monotonic()
    kill_at = start + asked.kill_every
    submitted, said = 0, start
    while len(outcomes.ended) < asked.requests:
        now = time.monotonic()
        if now - start > asked.limit:
            missing = asked.requests - len(outcomes.ended)
            raise TimeoutError(f"{missing} requests have not ended after {asked.limit:.0f} s")
        wanted = min(asked.requests, len(outcomes.ended) + asked.concurrent)
        orders = [_order(asked, number, drawn, prompts) for number in range(submitted, wanted)]
        submitted = wanted
        for number, decoder in enumerate(deployment.decoders):
            mine = [order for order in orders if order.number % asked.decoders == number]
            if mine:
                decoder.call("submit", mine)
            outcomes.ended += decoder.call("take")
        deployment.admit()
        left = asked.kills is None or outcomes.killed < asked.kills
        if left and now >= kill_at and deployment.prefillers:
            deployment.kill_one()
            outcomes.killed += 1
            kill_at = now + asked.kill_every
        if now - said > 2:
            said = now
            say(f"{len(outcomes.ended)} of {asked.requests} ended, {outcomes.killed} killed")
        time.sleep(_LOOK_S)
        outcomes.seconds = time.monotonic() - start


def _order(
    asked: Load, number: int, drawn: random.Random, prompts: list[GenerationRequest]
) -> Order:
    prompt = prompts[number % len(prompts)]
    leaves = drawn.random() < asked.cancelled
    patience = drawn.uniform(0, asked.patience) if leaves else None
    return Order(number, list(prompt.prompt), prompt.max_tokens, patience)


def _is_empty(state: dict[str, Any]) -> bool:
    return bool(state["idle"]) and state["open"] == 0


def _sheet(asked: Load, outcomes: Outcomes) -> Sheet:
    counts = Counter(one.outcome for one in outcomes.ended)
    done = [one for one in outcomes.ended if one.outcome == "done"]
    goodput = len(done) / outcomes.seconds
    tokens = sum(len(one.tokens) for one in done) / outcomes.seconds
    firsts = spread([one.first for one in done if one.first is not None] or [0.0])
    causes = Counter(one.cause for one in outcomes.ended if one.outcome == "failed")
    good = not outcomes.wrong and not outcomes.leaked and not counts["failed"]
    rows = (
        ("requests that ended", f"{len(outcomes.ended)} of {asked.requests}"),
        ("done / cancelled / failed", " / ".join(str(counts[o]) for o in _OUTCOMES)),
        ("tokens that differ from the reference's", str(len(outcomes.wrong))),
        ("processes that hold something at the end", str(len(outcomes.leaked))),
        ("prefillers killed", str(outcomes.killed)),
        ("requests that asked a second prefiller", str(_retried(outcomes))),
        ("seconds", f"{outcomes.seconds:.1f}"),
        ("goodput, requests/s", f"{goodput:.1f}"),
        ("goodput, tokens/s", f"{tokens:.0f}"),
        ("one process, not disaggregated, requests/s", f"{outcomes.alone:.1f}"),
        ("of it", f"{goodput / outcomes.alone:.2f}"),
        ("first token p50 / p99, s", f"{firsts['p50']:.2f} / {firsts['p99']:.2f}"),
        ("all end, none wrong, nothing leaked", verdict(good)),
    )
    return Sheet(
        title=f"{asked.concurrent} requests at a time, {asked.prefillers} prefillers, "
        f"{asked.decoders} decoders",
        columns=("", ""),
        rows=rows,
        notes=(
            f"{asked.preset}, prompts of {asked.prompt_tokens[0]} to {asked.prompt_tokens[1]} "
            f"tokens, {asked.cancelled:.0%} cancelled within {asked.patience:g} s, a prefiller "
            f"killed each {asked.kill_every:g} s and replaced",
            *(f"held: {one}" for one in outcomes.leaked),
            *(f"failed {count} times: {cause}" for cause, count in causes.most_common(5)),
        ),
        figures={"load": msgspec.to_builtins(asked), "outcomes": msgspec.to_builtins(outcomes)},
    )


_OUTCOMES: tuple[Outcome, ...] = ("done", "cancelled", "failed")


def _retried(outcomes: Outcomes) -> int:
    return sum(one.attempts > 1 for one in outcomes.ended)
