"""Many requests at once against prefillers that are killed: all end, none wrong, nothing leaks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from benchmarks.kvcache.nodes import Ended, Order
from fabric_ray.bench import stats
from fabric_ray.bench.child import Child
from fabric_ray.bench.results import Failure, Row, RowHeader, make_figure, make_row
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.instance import load_model, tokenizer
from fabric_ray.serve.messages import Generate

_PREFILLER = "benchmarks.kvcache.nodes:PrefillNode"
_DECODER = "benchmarks.kvcache.nodes:DecodeNode"
_PAGE_TOKENS = 16
_LOOK_S = 0.05
_SETTLE_S = 20.0
_TIMEOUT = 300.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a deployment. No two prompts are alike, so that no cache has a part."""

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
    limit: float = 600.0
    """Seconds until the run is given up."""
    model: str = "tiny-llama"
    seed: int = 1

    @property
    def serve_args(self) -> dict[str, Any]:
        """Of `ServeArgs`. A decoder has room for half of its share of the requests: the others
        wait for pages."""
        longest = -(-(self.prompt_tokens[1] + self.max_tokens[1]) // _PAGE_TOKENS)
        room = max(longest, self.concurrent // self.decoders // 2 * longest)
        decode = {
            "cache": {"page_tokens": _PAGE_TOKENS, "pages": room},
            "max_running": self.concurrent,
            "max_queue": self.concurrent,
            "queue_timeout": _TIMEOUT,
            "prefill_timeout": _TIMEOUT,
            "prefill_attempts": 20,
        }
        prefill = {
            "cache": {"page_tokens": _PAGE_TOKENS},
            "chunk_tokens": self.prompt_tokens[1],
            "max_running": 16,
            "max_queue": self.concurrent,
        }
        return {
            "model": self.model,
            # Tokens must not depend on which requests share a batch: float64 leaves no ties.
            "dtype": "float64",
            "prefill": prefill,
            "decode": decode,
            "terms": {"beat": 0.1, "silence": 5.0},
            "fabric": {"token": "load", "bind": "127.0.0.1", "transport": "shm"},
            "torch_threads": 1,
        }


class Outcomes(msgspec.Struct, kw_only=True):
    """What became of all requests."""

    ended: list[Ended] = []
    wrong: list[str] = []
    """Requests whose tokens aren't the reference's."""
    seconds: float = 0.0
    killed: int = 0
    leaked: list[str] = []
    """What processes hold when all is over."""
    alone: float = 0.0
    """Requests a second of one process that isn't disaggregated."""


def _child(maker: str, *arguments: Any) -> Child:
    return Child(maker, *arguments, name=arguments[-1], env={"OMP_NUM_THREADS": "1"})


class _Deployment:
    """The processes, and those that replace killed ones."""

    def __init__(self, load: Load) -> None:
        self._args = load.serve_args
        self._count = 0
        self.starting: list[Child] = []
        self.prefillers: dict[Child, bytes] = {}
        self.decoders: list[Child] = []
        try:
            for number in range(load.decoders):
                self.decoders.append(_child(_DECODER, self._args, f"decoder-{number}"))
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
        self.starting.append(_child(_PREFILLER, self._args, f"prefiller-{self._count}"))

    def admit(self) -> None:
        """Tells decoders of prefillers that are up."""
        for child in [child for child in self.starting if child.answered()]:
            child.end_call()
            self.starting.remove(child)
            self.prefillers[child] = child.call("offer")
            self._tell()

    def kill_one(self) -> None:
        """The prefiller that has been there for longest. Decoders find that out by themselves:
        they are told of it when its replacement is up."""
        child = next(iter(self.prefillers))
        del self.prefillers[child]
        child.kill()
        self.start()

    def _tell(self) -> None:
        offers = {child.name: offer for child, offer in self.prefillers.items()}
        for decoder in self.decoders:
            decoder.call("meet", offers)

    def leaks(self) -> list[str]:
        """What is still held, when there was time to give it back."""
        end = time.monotonic() + _SETTLE_S
        while True:
            children = (*self.decoders, *self.prefillers)
            held = [(child.name, child.call("held")) for child in children]
            left = [f"{name} holds {state}" for name, state in held if state]
            if not left or time.monotonic() > end:
                return left
            time.sleep(_LOOK_S)

    def end(self) -> None:
        for child in (*self.decoders, *self.prefillers, *self.starting):
            child.kill()


def load(asked: Load, outcomes: Outcomes, say: Callable[[str], None]) -> None:
    """Runs until all requests have ended."""
    drawn = random.Random(asked.seed)
    orders = [_order(asked, number, drawn) for number in range(asked.requests)]
    say("the reference")
    reference = _reference(asked, orders, outcomes)
    deployment = _Deployment(asked)
    try:
        _drive(asked, deployment, orders, outcomes, say)
        outcomes.leaked = deployment.leaks()
    finally:
        deployment.end()
    for one in outcomes.ended:
        whole = reference[one.id]
        if one.tokens != (whole if one.outcome == "done" else whole[: len(one.tokens)]):
            outcomes.wrong.append(one.id)


def _order(asked: Load, number: int, drawn: random.Random) -> Order:
    prompt = tuple(drawn.randrange(256) for _ in range(drawn.randint(*asked.prompt_tokens)))
    tokens = drawn.randint(*asked.max_tokens)
    leaves = drawn.random() < asked.cancelled
    patience = drawn.uniform(0, asked.patience) if leaves else None
    return Order(Generate(f"r{number}", prompt, tokens, stream=True), patience)


def _reference(asked: Load, orders: list[Order], outcomes: Outcomes) -> dict[str, tuple[int, ...]]:
    torch.set_num_threads(1)  # as in the deployment's processes
    args = ServeArgs.model_validate(asked.serve_args)
    engine = TorchEngine(load_model(args, tp=1))
    generator = Generator(engine, chunk_tokens=asked.prompt_tokens[1])
    stop = tokenizer(args).stop
    requests = [order.request for order in orders]
    start = time.monotonic()
    tokens = generator.run([GenerationRequest(r.tokens, r.max_tokens, stop=stop) for r in requests])
    outcomes.alone = len(orders) / (time.monotonic() - start)
    return {r.id: tuple(found) for r, found in zip(requests, tokens, strict=True)}


def _drive(
    asked: Load,
    deployment: _Deployment,
    orders: list[Order],
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
        fresh = orders[submitted:wanted]
        submitted = wanted
        for number, decoder in enumerate(deployment.decoders):
            if fresh[number :: asked.decoders]:
                decoder.call("submit", fresh[number :: asked.decoders])
            outcomes.ended += decoder.call("take")
        deployment.admit()
        left = asked.kills is None or outcomes.killed < asked.kills
        # Where all prefillers are lost, requests fail at once.
        if left and now >= kill_at and len(deployment.prefillers) > 1:
            deployment.kill_one()
            outcomes.killed += 1
            kill_at = now + asked.kill_every
        if now - said > 2:
            said = now
            say(f"{len(outcomes.ended)} of {asked.requests} ended, {outcomes.killed} killed")
        time.sleep(_LOOK_S)
        outcomes.seconds = time.monotonic() - start


def row(asked: Load, outcomes: Outcomes) -> Row:
    """Requests a second that ended well, beside those of one process; what went wrong fails."""
    counts = Counter(one.outcome for one in outcomes.ended)
    done = [one for one in outcomes.ended if one.outcome == "done"]
    firsts = stats.spread([one.first for one in done if one.first is not None] or [0.0])
    wrong = [
        *(f"request {id} has other tokens than the reference" for id in outcomes.wrong),
        *outcomes.leaked,
        *(one.cause for one in outcomes.ended if one.outcome == "failed"),
    ]
    details = {
        "ended": f"{len(outcomes.ended)} of {asked.requests}",
        **{outcome: counts[outcome] for outcome in ("done", "cancelled", "failed")},
        "wrong": len(outcomes.wrong),
        "leaks": len(outcomes.leaked),
        "killed": outcomes.killed,
        "asked a second prefiller": sum(one.attempts > 1 for one in outcomes.ended),
        "seconds": outcomes.seconds,
        "tokens/s": sum(len(one.tokens) for one in done) / outcomes.seconds,
        "first token p50 s": firsts["p50"],
        "first token p99 s": firsts["p99"],
    }
    header = RowHeader(
        key=f"load/{asked.concurrent} at a time, {asked.prefillers} prefillers, "
        f"{asked.decoders} decoders",
        unit="op/s",
        aim="all end, none wrong, no leaks",
    )
    figures = [make_figure(header, "one process", "peer", [[1 / outcomes.alone]])]
    if done:
        each = outcomes.seconds / len(done)
        figures.append(make_figure(header, "disaggregated", "ours", [[each]], details=details))
    failures = [Failure(contender="disaggregated", reason=one) for one in wrong[:10]]
    complete = len(outcomes.ended) == asked.requests
    return make_row(header, figures, failures, complete=complete)
