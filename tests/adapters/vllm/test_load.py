"""Many requests over real servers: every output is that of a plain server (RS-1), and at the end no
block is held (MR-1).

``FABRIC_RAY_KV_REQUESTS`` is their number: 300 by default, 10,000 in ``make test-all``. Lengths,
shared prefixes, order of arrival, sampling, concurrency, clients that leave and a prefiller that is
killed are drawn from ``FABRIC_RAY_KV_SEED``.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import random_prompt
from tests.adapters.vllm.servers import VOCABULARY, Server, ServerError, Spec

pytestmark = [*servers.needed, pytest.mark.timeout(6 * 3600)]

REQUESTS = int(os.environ.get("FABRIC_RAY_KV_REQUESTS", "300"))
SEED = int(os.environ.get("FABRIC_RAY_KV_SEED", "1"))
CONCURRENCY = (1, 4, 16, 64)
WAVE = 50
"""Requests between two changes of the concurrency."""
NOISE = 1e-3
"""Least difference of a logarithm of a probability that is none of rounding: batches of other sizes
are summed in another order."""
LONGEST, TOKENS = 700, 12
BLOCKS = ("--block-size", "32")
UNCUT = ("--max-num-batched-tokens", str(max(CONCURRENCY) * (LONGEST + 200)))
"""A step takes the prompts of all requests at a time: where it cuts a seeded request's prompt,
vLLM ends on the CPU, whose generators of random numbers can't be set back."""
LIMITS = {"lease": 60.0, "timeout": 120.0, "terms": {"beat": 0.5, "silence": 60.0}}


@dataclass(frozen=True)
class Drawn:
    """A request."""

    prompt: list[int]
    order: str
    """Which of the two servers is asked first: ``prefiller``, ``decoder`` or ``both``."""
    sampling: dict[str, Any]
    leaves: bool
    """Whether its client leaves after the first token."""


def drawn(source: random.Random, prefixes: list[list[int]]) -> Drawn:
    prompt = random_prompt(source, source.choice([1, 31, 32, 33, source.randrange(2, LONGEST)]))
    if source.random() < 0.5:
        prompt = source.choice(prefixes) + prompt
    seeded = {"temperature": 0.8, "top_p": 0.95, "seed": source.randrange(1 << 30)}
    return Drawn(
        prompt[: LONGEST + 200],
        source.choice(["prefiller", "decoder", "both"]),
        seeded if source.random() < 0.3 else {},
        source.random() < 0.05,
    )


@dataclass(frozen=True)
class Answer:
    """The tokens of a completion, and the logarithms of their probabilities. These tell prompts
    apart of which one token of hundreds differs, where the most probable tokens don't."""

    tokens: list[int]
    logprobs: list[float]

    def differs(self, other: Answer, noise: float) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens != other.tokens or any(abs(a - b) > noise for a, b in pairs)


@dataclass
class Stand:
    plain: Server
    prefiller: Server
    decoder: Server
    stack: ExitStack
    offer: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prefill(self, prompt: list[int], transfer: str) -> dict[str, Any]:
        asked = {"do_remote_decode": True, "transfer_id": transfer}
        answer = self.prefiller.complete(prompt, 1, asked)
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    def ask(self, each: Drawn) -> Answer | None:
        """The decoder's answer; ``None`` where the client has left."""
        name = uuid.uuid4().hex
        known = {"do_remote_prefill": True, "transfer_id": name, "remote_offer": self.offer}
        if each.order == "prefiller":
            with suppress(ServerError):  # one that was killed: the decoder computes the prompt
                known = self.prefill(each.prompt, name)
            return self.decode(each, known)
        other = threading.Thread(target=self._prefill_later, args=(each, name))
        if each.order == "both":
            other.start()
            found = self.decode(each, known)
        else:
            timer = threading.Timer(0.05, other.start)
            timer.start()
            found = self.decode(each, known)
            timer.join()
        other.join()
        return found

    def decode(self, each: Drawn, params: dict[str, Any]) -> Answer | None:
        if each.leaves:
            stream = self.decoder.stream(each.prompt, TOKENS, params)
            next(stream, None)
            stream.close()  # type: ignore[attr-defined]
            return None
        return answered(self.decoder, each, params)

    def expected(self, each: Drawn) -> Answer:
        return answered(self.plain, each)

    def replace_prefiller(self) -> None:
        """Kills the prefiller; its successor has another offer."""
        self.prefiller.kill()
        (self.prefiller,) = self.stack.enter_context(servers.running(prefiller()))
        self.offer = self.prefill([9, 8, 7], uuid.uuid4().hex)["remote_offer"]

    def _prefill_later(self, each: Drawn, name: str) -> None:
        with suppress(ServerError):
            self.prefill(each.prompt, name)


def answered(server: Server, each: Drawn, params: dict[str, Any] | None = None) -> Answer:
    response = server.complete(each.prompt, TOKENS, params, logprobs=1, **each.sampling)
    (choice,) = response["choices"]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def prefiller() -> Spec:
    chunks = ("--max-num-batched-tokens", "256")
    return Spec("p", (*BLOCKS, *chunks, *servers.kv_transfer("kv_producer", **LIMITS)))


def decoder() -> Spec:
    option, text = servers.kv_transfer("kv_consumer", **LIMITS)
    config = json.loads(text) | {"kv_load_failure_policy": "recompute"}
    return Spec("d", (*BLOCKS, *UNCUT, option, json.dumps(config)))


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with ExitStack() as stack:
        specs = Spec("plain", (*BLOCKS, *UNCUT)), prefiller(), decoder()
        made = Stand(*stack.enter_context(servers.running(*specs)), stack)
        made.offer = made.prefill([9, 8, 7], uuid.uuid4().hex)["remote_offer"]
        yield made


@pytest.mark.parametrize("length", [40, LONGEST])
def test_each_token_of_a_prompt_changes_the_output(stand: Stand, length: int) -> None:
    source = random.Random(length)
    prompt = random_prompt(source, length)
    wanted = stand.expected(Drawn(prompt, "", {}, leaves=False))
    for place in {0, 1, length // 3, length - 2, length - 1}:
        other = list(prompt)
        other[place] = 4 + (other[place] + 7) % (VOCABULARY - 4)
        found = stand.expected(Drawn(other, "", {}, leaves=False))
        assert found.differs(wanted, 2 * NOISE), place


def test_outputs_are_those_of_a_plain_server(stand: Stand, capsys: Any) -> None:
    source = random.Random(SEED)
    prefixes = [random_prompt(source, length) for length in (32, 64, 200)]
    asked = [drawn(source, prefixes) for _ in range(REQUESTS)]
    waves = [asked[i : i + WAVE] for i in range(0, REQUESTS, WAVE)]
    wrong, began = [], time.monotonic()
    for number, wave in enumerate(waves):
        # The prefiller dies once, while requests of a wave run.
        killer = threading.Thread(target=stand.replace_prefiller)
        try:
            with ThreadPoolExecutor(source.choice(CONCURRENCY)) as pool:
                got = pool.map(stand.ask, wave)
                if number == len(waves) // 2:
                    time.sleep(0.5)
                    killer.start()
                found = list(got)
        finally:
            if killer.ident is not None:
                killer.join()  # or its server would outlive this test
        with ThreadPoolExecutor(4) as pool:
            wanted = list(pool.map(stand.expected, wave))
        for each, answer, right in zip(wave, found, wanted, strict=True):
            if answer is not None and answer.differs(right, NOISE):
                wrong.append((each, answer, right))
        assert not wrong
    seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\n{REQUESTS} requests in {seconds:.0f} s, {REQUESTS / seconds:.2f}/s")
    hits = stand.decoder.metric("vllm:external_prefix_cache_hits_total")
    assert hits > 0.3 * sum(len(each.prompt) for each in asked)


def test_mr_1_no_block_is_held_when_all_requests_are_over(stand: Stand) -> None:
    deadline = time.monotonic() + 2 * LIMITS["lease"]  # type: ignore[operator]
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for server in (stand.prefiller, stand.decoder):
        while True:
            # An engine that rests notices nothing, and its figures are the last step's.
            server.complete([7], 1)
            if not any(server.metric(f"vllm:{name}") for name in names):
                break
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.5)
