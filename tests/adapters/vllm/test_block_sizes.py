"""Blocks and ranks that differ at the two ends, on real servers (RS-1).

vLLM's CPU kernels pack keys across the tokens of a page: such pages can be divided by heads, and
not by tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import Server, ServerError, Spec

pytestmark = servers.needed

TOKENS = 16


@dataclass
class Ends:
    plain: Server
    prefiller: Server
    """Of two ranks, with blocks of 32 tokens."""


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    blocks = ("--block-size", "32")
    ranks = ("--tensor-parallel-size", "2")
    prefill = Spec("p", (*blocks, *ranks, *servers.kv_transfer("kv_producer")))
    with servers.running(Spec("plain", blocks), prefill) as (plain, p):
        yield Ends(plain, p)


def test_rs_1_cpu_kernels_pack_pages_across_tokens_and_not_across_heads() -> None:
    script = Path(__file__).with_name("cpu_pages.py")
    environment = {**os.environ, "PYTHONPATH": str(servers.ROOT), "VLLM_TARGET_DEVICE": "cpu"}
    ran = subprocess.run(
        [servers.PYTHON, script], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers = json.loads(ran.stdout.splitlines()[-1])
    assert "plain" in answers["float32"]
    for kind, found in answers.items():
        if "missing" in found:
            continue
        assert (found["plain"]["tokens"], found["plain"]["heads"]) == (False, True), kind
        assert found["half of the heads"]["name"] == found["plain"]["name"], kind
        assert found["larger blocks"]["name"] != found["plain"]["name"], kind
        # The bytes of an fp8 cache say nothing without their scales.
        rescaled = found["other scales"]["name"] != found["plain"]["name"]
        assert rescaled == (kind == "fp8"), kind


def decoder(block: int) -> Spec:
    return Spec("d", ("--block-size", str(block), *servers.kv_transfer("kv_consumer")))


def test_rs_1_ranks_may_differ_where_pages_divide_by_heads(ends: Ends) -> None:
    source = random.Random(1)
    prompts = [random_prompt(source, length) for length in (1, 31, 32, 33, 64, 200, 700)]
    with servers.running(decoder(32)) as (d,), ThreadPoolExecutor() as pool:
        router = Router(ends.prefiller, d, pool)
        for prompt in prompts:
            assert router.after_prefill(prompt, TOKENS) == ends.plain.tokens(prompt, TOKENS)
        # The prompt of one token has nothing to be transferred.
        assert d.metric("vllm:external_prefix_cache_hits_total") > 0


def test_rs_1_pages_packed_by_other_numbers_of_tokens_are_refused(ends: Ends) -> None:
    source = random.Random(2)
    with servers.running(decoder(64)) as (d,), ThreadPoolExecutor() as pool:
        router = Router(ends.prefiller, d, pool)
        for length in (64, 100):
            prompt = random_prompt(source, length)
            with pytest.raises(ServerError):
                router.after_prefill(prompt, TOKENS)
            # Nothing of it is in the decoder's prefix cache.
            assert d.tokens(prompt, TOKENS) == ends.plain.tokens(prompt, TOKENS)
        log = d.log.read_text()
        assert "the caches don't fit" in log
        assert "packed by 32 tokens" in log
        assert "packed by 64 tokens" in log
