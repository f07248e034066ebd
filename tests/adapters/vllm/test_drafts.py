"""Speculative decoding by a draft model, on real servers: outputs are those of a plain server, and
the draft model's pages are moved with the others.

The draft model is the model itself. So every draft is accepted that is computed from right pages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed

TOKENS, DRAFTS = 16, 3
LENGTHS = (1, 2, 31, 33, 64, 65, 200, 700)


@dataclass
class Stand:
    plain: Server
    router: Router


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    speculative = {
        "method": "draft_model",
        "model": str(servers.tiny_model()),
        "num_speculative_tokens": DRAFTS,
    }
    common = ("--block-size", "32", "--speculative-config", json.dumps(speculative))
    chunks = ("--max-num-batched-tokens", "256")
    prefill = Spec("p", (*common, *chunks, *servers.kv_transfer("kv_producer")))
    decode = Spec("d", (*common, *servers.kv_transfer("kv_consumer")))
    with (
        servers.running(Spec("plain", common), prefill, decode) as (plain, p, d),
        ThreadPoolExecutor(4) as pool,
    ):
        yield Stand(plain, Router(p, d, pool))


def test_drafts_of_a_decoder_are_computed_from_moved_pages(stand: Stand) -> None:
    source = random.Random(1)
    for length in LENGTHS:
        prompt = random_prompt(source, length)
        found = stand.router.after_prefill(prompt, TOKENS)
        assert found == stand.plain.tokens(prompt, TOKENS), length
    decoder = stand.router.decoder
    assert decoder.metric("vllm:external_prefix_cache_hits_total") >= sum(LENGTHS) - len(LENGTHS)
    drafted = decoder.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = decoder.metric("vllm:spec_decode_num_accepted_tokens_total")
    # In a step that computes one token of a prompt vLLM 0.32 proposes what it refuses itself, with
    # hits of its own prefix cache, too. A wrong page would have all later drafts refused.
    assert drafted - accepted <= DRAFTS * len(LENGTHS) < accepted
