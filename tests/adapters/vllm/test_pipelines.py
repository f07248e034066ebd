"""Pipelines of real servers: every output is that of a plain server (RS-1).

vLLM's CPU build computes pipelines where it compiles a model; without that a stage lacks the
buffers for what comes from the one before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import Server, Spec
from tests.adapters.vllm.test_weights import (
    NEW,
    OLD,
    push_while_requests_run,
    sharded_trainers,
    standing,
    trainer,
)

pytestmark = servers.needed

TOKENS = 16
# Prompts are computed in chunks.
EVERY = ("--block-size", "32", "--max-num-batched-tokens", "256")
COMPILED = ("--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}')
PIPELINE = (*COMPILED, "--pipeline-parallel-size", "2")


@dataclass
class Ends:
    plain: Server
    prefiller: Server
    """A pipeline of two stages."""


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    prefill = Spec("p", (*EVERY, *PIPELINE, *servers.kv_transfer("kv_producer")))
    with servers.running(Spec("plain", EVERY), prefill) as (plain, p):
        yield Ends(plain, p)


@pytest.mark.parametrize("decode", [(), PIPELINE], ids=["one stage", "two stages"])
def test_rs_1_pages_of_a_pipeline_bring_the_tokens_of_a_plain_server(
    ends: Ends, decode: tuple[str, ...]
) -> None:
    source = random.Random(len(decode))
    shared = random_prompt(source, 100)
    lengths = [1, 2, 31, 32, 33, 64, 300, 700, 1100]
    prompts = [random_prompt(source, length) for length in lengths]
    prompts += [shared + random_prompt(source, length) for length in (5, 60)]
    arguments = (*EVERY, *decode, *servers.kv_transfer("kv_consumer"))
    with servers.running(Spec("d", arguments)) as (d,), ThreadPoolExecutor(32) as pool:
        router = Router(ends.prefiller, d, pool)
        wanted = list(pool.map(lambda prompt: ends.plain.tokens(prompt, TOKENS), prompts))
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert router.after_prefill(prompt, TOKENS) == tokens
        assert d.metric("vllm:external_prefix_cache_hits_total") > 0
        fresh = [random_prompt(source, len(prompt)) for prompt in prompts]
        wanted = list(pool.map(lambda prompt: ends.plain.tokens(prompt, TOKENS), fresh))
        asked = [pool.submit(router.before_prefill, prompt, TOKENS) for prompt in fresh]
        assert [each.result() for each in asked] == wanted


def test_rs_3_both_stages_put_a_version_into_use_together_while_requests_run() -> None:
    with standing("llama", *PIPELINE) as stand, ThreadPoolExecutor(8) as pool:
        with sharded_trainers(stand.server, workers=2) as trainers:
            push_while_requests_run(stand, trainers, pool, NEW, OLD)
        with trainer(stand.server, workers=2) as sender:
            assert sender.send(NEW) is None
            assert stand.right(NEW) == 30
