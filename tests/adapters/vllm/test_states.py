"""Models with states beside attention on real servers: every output is that of a plain server
(RS-1).

Each token of a prompt changes the output through the states, however far back it is. So equal
outputs show that the decoder had the state of the right moment.

With 16 bits outputs depend on how a prompt is cut into steps. A decoder computes its last token by
itself; so does the plain server with prompts whose last token is what it generates next.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import VOCABULARY, Server, Spec

pytestmark = servers.needed

TOKENS = 12


# As vLLM chooses it for this model, with bfloat16: it computes gated delta nets on CPUs so only.
BLOCK, DTYPE = 384, ("--dtype", "bfloat16")
# vLLM saves states at the ends of blocks, or has one block of states for each request.
CACHING = {"prefix caching": (), "no prefix caching": ("--no-enable-prefix-caching",)}


@dataclass
class Stand:
    plain: Server
    prefiller: Server
    router: Router
    pool: ThreadPoolExecutor


@pytest.fixture(scope="module", params=CACHING)
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """A plain server, a prefiller and a decoder. They compute prompts in chunks."""
    every = (*DTYPE, "--max-num-batched-tokens", "256", *CACHING[request.param])
    prefill = (*every, *servers.kv_transfer("kv_producer"))
    decode = (*every, *servers.kv_transfer("kv_consumer"))
    with (
        servers.running(
            Spec("plain", every, kind="qwen3_next"),
            Spec("p", prefill, kind="qwen3_next"),
            Spec("d", decode, kind="qwen3_next"),
        ) as (plain, p, d),
        ThreadPoolExecutor(32) as pool,
    ):
        yield Stand(plain, p, Router(p, d, pool), pool)


def continued(stand: Stand, first: list[int]) -> tuple[list[int], list[int]]:
    """A prompt that begins so, and what a plain server says to it."""
    token, *rest = stand.plain.tokens(first, TOKENS + 1)
    return [*first, token], rest


# A state ends a block, or lacks one token of it, or has one of the next.
LENGTHS = [2, 3, 31, *range(BLOCK - 1, BLOCK + 3), *range(2 * BLOCK, 2 * BLOCK + 3), 900]


@pytest.mark.parametrize("length", [40, 500])
def test_each_token_of_a_prompt_changes_the_output(stand: Stand, length: int) -> None:
    prompt = random_prompt(random.Random(length), length)
    wanted = stand.plain.tokens(prompt, TOKENS)
    for place in (0, 1, length // 3, length - 3, length - 2, length - 1):
        other = list(prompt)
        other[place] = 4 + (other[place] + 7) % (VOCABULARY - 4)
        assert stand.plain.tokens(other, TOKENS) != wanted, place


@pytest.mark.parametrize("order", ["after the prefill", "before it"])
def test_outputs_are_those_of_a_plain_server(stand: Stand, order: str) -> None:
    source = random.Random(order)
    router = stand.router
    answer = router.before_prefill if order == "before it" else router.after_prefill
    hits = router.decoder.metric("vllm:external_prefix_cache_hits_total")
    for length in LENGTHS:
        prompt, wanted = continued(stand, random_prompt(source, length - 1))
        got = answer(prompt, TOKENS)
        assert got == wanted, length
    # All but the last token of each.
    hits = router.decoder.metric("vllm:external_prefix_cache_hits_total") - hits
    assert hits == sum(LENGTHS) - len(LENGTHS)


def test_prompts_that_share_a_prefix(stand: Stand) -> None:
    source = random.Random(5)
    common = random_prompt(source, 2 * BLOCK + 9)
    tails = [random_prompt(source, length) for length in (1, 2, 30, BLOCK - 9, BLOCK, 150)]
    prompts = [common[: source.choice([BLOCK, 2 * BLOCK, len(common)])] + tail for tail in tails]
    for _ in range(2):
        # Then both ends have pages and states of the prefixes.
        for prompt, wanted in [continued(stand, prompt) for prompt in prompts]:
            assert stand.router.after_prefill(prompt, TOKENS) == wanted


def test_mr_1_a_state_stays_until_its_decoder_has_it(stand: Stand) -> None:
    source = random.Random(3)
    for length in (37, BLOCK + 1, 700):
        prompt, wanted = continued(stand, random_prompt(source, length))
        params = stand.router.prefill(prompt, uuid.uuid4().hex)
        # Others get the blocks that vLLM has taken back.
        for _ in range(4):
            stand.prefiller.tokens(random_prompt(source, 300), 2)
        assert stand.router.decoder.tokens(prompt, TOKENS, params) == wanted
