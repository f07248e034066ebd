"""Prompts that share a new prefix, on real servers: every output is that of a plain server.

vLLM counts blocks as hits from the moment at which they are allocated. Requests that are scheduled
in one step are hits of each other, before any page of them is written (RS-1).
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed

ROUNDS = 4
PREFIX, TOKENS = 64, 16
ENGINE = {"terms": {"beat": 0.5, "silence": 60.0}}


@dataclass
class Stand:
    plain: Server
    router: Router
    pool: ThreadPoolExecutor


@pytest.fixture(scope="module", params=["eager", "piecewise"])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """A plain server, a prefiller and a decoder of the same model."""
    blocks = ("--block-size", "32")
    compiled = () if request.param == "eager" else ("--no-enforce-eager",)
    chunks = ("--max-num-batched-tokens", "512")
    prefill = Spec(
        "p", (*blocks, *chunks, *compiled, *servers.kv_transfer("kv_producer", **ENGINE))
    )
    decode = Spec("d", (*blocks, *servers.kv_transfer("kv_consumer", **ENGINE)))
    with (
        servers.running(Spec("plain", blocks), prefill, decode) as (plain, p, d),
        ThreadPoolExecutor(32) as pool,
    ):
        yield Stand(plain, Router(p, d, pool), pool)


@pytest.mark.parametrize("first", ["decoder", "prefiller"])
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_rs_1_prompts_with_a_common_new_prefix_in_one_step(
    stand: Stand, first: str, reverse: bool
) -> None:
    source = random.Random(f"{first} {reverse}")
    for _ in range(ROUNDS):
        prefix = random_prompt(source, PREFIX)
        prompts = [prefix + random_prompt(source, source.choice([1, 9, 40])) for _ in range(4)]
        later = [prefix + random_prompt(source, 5) for _ in range(2)]
        wanted = [stand.plain.tokens(prompt, TOKENS) for prompt in prompts + later]
        names = [uuid.uuid4().hex for _ in prompts]
        order = list(range(len(prompts)))[:: -1 if reverse else 1]
        _ = stand.router.offer

        # A long prompt keeps the prefiller busy, so that the others are scheduled in one step.
        busy = stand.pool.submit(stand.router.prefiller.tokens, random_prompt(source, 1900), 1)
        time.sleep(0.05)
        asked = {}
        if first == "decoder":
            asked = {i: stand.router.decode_early(prompts[i], TOKENS, names[i]) for i in order}
            time.sleep(0.1)
        prefills = [stand.router.prefill_soon(prompts[i], names[i]) for i in order]
        if first == "prefiller":
            asked = {i: stand.router.decode_early(prompts[i], TOKENS, names[i]) for i in order}
        got = [asked[i].result() for i in range(len(prompts))]
        busy.result()
        for prefill in prefills:
            prefill.result()

        # Requests of the decoder alone find the pages in its prefix cache.
        got += [stand.router.decoder.tokens(prompt, TOKENS) for prompt in later]
        assert got == wanted
