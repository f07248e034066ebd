"""A decoder whose queue is longer than its prefiller's lease, on real servers."""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.adapters.vllm import servers
from tests.adapters.vllm.router import Router, random_prompt
from tests.adapters.vllm.servers import Server, Spec

pytestmark = servers.needed

LEASE = 3.0
REQUESTS, LENGTH, TOKENS = 8, 96, 8
LONG = 1500
"""Tokens of each of two requests that come first."""
BLOCKS = ("--block-size", "32")
TERMS = {"beat": 0.2, "silence": 60.0}


def specs() -> tuple[Spec, Spec]:
    p = servers.kv_transfer("kv_producer", lease=LEASE, terms=TERMS)
    d = servers.kv_transfer("kv_consumer", policy="recompute", terms=TERMS)
    return Spec("p", (*BLOCKS, *p)), Spec("d", (*BLOCKS, "--max-num-seqs", "1", *d))


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Other requests make the server step, so that it notices leases that have ended."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.1):
            server.complete([5, 6, 7], 1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()


def test_pages_wait_while_their_request_is_in_the_decoders_queue() -> None:
    source = random.Random(27)
    prompts = [random_prompt(source, LENGTH) for _ in range(REQUESTS)]
    with servers.running(*specs()) as (p, d), ThreadPoolExecutor(REQUESTS + 2) as pool, busy(p):
        router = Router(p, d, pool)
        # vLLM looks at no other request while these have the decoder's only place.
        first = d.stream([5, 6, 7], LONG)
        next(first)
        others = [pool.submit(list, first), pool.submit(d.tokens, [8, 9, 10], LONG)]
        asked, began = [], time.monotonic()
        for prompt in prompts:
            params = router.prefill(prompt, uuid.uuid4().hex)
            asked.append(pool.submit(d.tokens, prompt, TOKENS, params))
        for other in others:
            other.result()
        seconds = time.monotonic() - began
        got = [each.result() for each in asked]
        lost = re.findall(r"request \S+ lacks its pages", d.log.read_text(errors="replace"))
        print(f"{REQUESTS} requests waited for {seconds:.1f} s, {len(lost)} prompts recomputed")
        assert seconds > 1.5 * LEASE
        assert not lost
        assert d.metric("vllm:external_prefix_cache_hits_total") >= REQUESTS * (LENGTH - 1)
        assert got == list(pool.map(p.tokens, prompts, [TOKENS] * REQUESTS))
