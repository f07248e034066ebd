"""Models with sliding windows on real servers, with vLLM's hybrid manager on: every output is that
of a plain server (RS-1).

A token changes the output, whether it is inside of the window or before it. So equal outputs show
that the decoder had the right pages of every cache group.
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
from tests.adapters.vllm.servers import VOCABULARY, Server, Spec
from tests.adapters.vllm.tiny_hybrid import WINDOW

pytestmark = servers.needed

BLOCK, TOKENS, ROUNDS = 32, 16, 3
# Blocks of a window end, or lack one token, or have one too many.
LENGTHS = (1, 2, 31, 33, *range(WINDOW - 2, WINDOW + 3), 95, 96, 97, 127, 128, 200, 700)


@dataclass
class Stand:
    plain: Server
    prefiller: Server
    router: Router
    pool: ThreadPoolExecutor


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss"])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """A plain server, a prefiller that computes prompts in chunks, and a decoder."""
    kind = request.param
    blocks = ("--block-size", str(BLOCK))
    chunks = ("--max-num-batched-tokens", "256")
    prefill = (*blocks, *chunks, *servers.kv_transfer("kv_producer"))
    decode = (*blocks, *servers.kv_transfer("kv_consumer"))
    with (
        servers.running(
            Spec("plain", blocks, kind=kind),
            Spec("p", prefill, kind=kind),
            Spec("d", decode, kind=kind),
        ) as (plain, p, d),
        ThreadPoolExecutor(32) as pool,
    ):
        for server in (p, d):
            assert "kv cache group sizes" in server.log.read_text(), "several groups"
        yield Stand(plain, p, Router(p, d, pool), pool)


@pytest.mark.parametrize("length", [WINDOW // 2, 2 * WINDOW + 9])
def test_each_token_of_a_prompt_changes_the_output(stand: Stand, length: int) -> None:
    source = random.Random(length)
    prompt = random_prompt(source, length)
    wanted = stand.plain.tokens(prompt, TOKENS)
    for place in {0, 1, length // 3, length - WINDOW - 1, length - WINDOW, length - 2, length - 1}:
        if place < 0:
            continue
        other = list(prompt)
        other[place] = 4 + (other[place] + 7) % (VOCABULARY - 4)
        assert stand.plain.tokens(other, TOKENS) != wanted, place


@pytest.mark.parametrize("order", ["after the prefill", "before it"])
def test_outputs_are_those_of_a_plain_server(stand: Stand, order: str) -> None:
    source = random.Random(order)
    router = stand.router
    answer = router.before_prefill if order == "before it" else router.after_prefill
    for length in LENGTHS:
        prompt = random_prompt(source, length)
        got = answer(prompt, TOKENS)
        assert got == stand.plain.tokens(prompt, TOKENS), length
    assert router.decoder.metric("vllm:external_prefix_cache_hits_total") > sum(LENGTHS) / 2


def test_mr_1_a_window_stays_while_the_prefiller_generates(stand: Stand) -> None:
    source = random.Random(3)
    prompts = [random_prompt(source, length) for length in (WINDOW + 31, 150, 319)]
    for prompt in prompts:
        asked = {"do_remote_decode": True, "transfer_id": uuid.uuid4().hex}
        answer = stand.prefiller.complete(prompt, 2 * WINDOW, asked)
        # Others get the blocks that vLLM has taken back.
        for _ in range(4):
            stand.prefiller.tokens(random_prompt(source, 300), 2)
        got = stand.router.decoder.tokens(prompt, TOKENS, answer["kv_transfer_params"])
        assert got == stand.plain.tokens(prompt, TOKENS)


@pytest.mark.parametrize("prefix", [BLOCK, WINDOW, 5 * BLOCK])
@pytest.mark.parametrize("first", ["decoder", "prefiller"])
def test_rs_1_prompts_with_a_common_new_prefix_in_one_step(
    stand: Stand, first: str, prefix: int
) -> None:
    source = random.Random(f"{first} {prefix}")
    for _ in range(ROUNDS):
        common = random_prompt(source, prefix)
        prompts = [common + random_prompt(source, source.choice([1, 9, 40, 90])) for _ in range(4)]
        later = [common + random_prompt(source, 5) for _ in range(2)]
        wanted = [stand.plain.tokens(prompt, TOKENS) for prompt in prompts + later]
        names = [uuid.uuid4().hex for _ in prompts]
        _ = stand.router.offer
        # A long prompt keeps the prefiller busy, so that the others are scheduled in one step.
        busy = stand.pool.submit(stand.prefiller.tokens, random_prompt(source, 1900), 1)
        time.sleep(0.05)
        pairs = list(zip(prompts, names, strict=True))
        if first == "decoder":
            asked = [stand.router.decode_early(prompt, TOKENS, name) for prompt, name in pairs]
            time.sleep(0.1)
        prefills = [stand.router.prefill_soon(prompt, name) for prompt, name in pairs]
        if first == "prefiller":
            asked = [stand.router.decode_early(prompt, TOKENS, name) for prompt, name in pairs]
        got = [each.result() for each in asked]
        for each in (busy, *prefills):
            each.result()
        # Requests of the decoder alone find the pages in its prefix cache.
        got += [stand.router.decoder.tokens(prompt, TOKENS) for prompt in later]
        assert got == wanted
