"""A prefill worker's end of the KV connector without vLLM: blocks that are taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import NotQuiesced
from fabric_ray.integrations import vllm_kv_send
from fabric_ray.integrations.vllm_kv_layout import Shards, WorkerCache, worker_cache
from fabric_ray.integrations.vllm_kv_plan import Claim, Ready, digest
from fabric_ray.integrations.vllm_kv_send import Sender
from fabric_ray.kvcache import Decoder, Prefiller, Pull, RankCache, Terms
from fabric_ray.kvcache.errors import PrefillFailed
from tests.kv_pages import rows
from tests.processes import within

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 6, 2, 8, 4
PROMPT = tuple(range(20))
TERMS = Terms(beat=0.1, silence=5.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def cached(stack: ExitStack, name: str) -> tuple[WorkerCache, RankCache]:
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    tensors = {
        f"layers.{i}.attn": torch.full(shape, i + 1.0 if name == "p" else 0.0)
        for i in range(LAYERS)
    }
    shards = Shards(ranks=1, rank=0, shards=1)
    cache = worker_cache(tensors, block_tokens=TOKENS, shards=shards, model="m", form=rows)
    engine = stack.enter_context(TransferEngine(name=name))
    regions = [engine.register(buffer) for buffer in cache.buffers]
    return cache, RankCache(engine, cache.layouts[0], regions)


class Pair:
    """A sender, and a decoder that has asked it for the pages of a prompt."""

    def __init__(
        self, stack: ExitStack, *, then: Callable[[Callable[[], object]], None], lease: float
    ) -> None:
        cache, rank = cached(stack, "p")
        self.sender = Sender(Prefiller([rank], terms=TERMS), cache, then=then, lease=lease)
        stack.callback(self.sender.close)
        theirs, rank = cached(stack, "d")
        decoder = stack.enter_context(Decoder([rank], terms=TERMS))
        claim = Claim("t", digest(PROMPT), "attempt", 1)
        self.pull: Pull = decoder.pull(
            decoder.connect(self.sender.offer()),
            tokens=len(PROMPT),
            tables=theirs.tables([0, 1, 2], len(PROMPT)),
            payload=claim.encoded(),
        )
        self.ready = Ready("r", "t", digest(PROMPT), len(PROMPT), 0, (3, 4, 5))
        within(10, "the request", lambda: "t" in self.sender._transfers)


def test_preempted_requests_that_cannot_be_sent_block_no_batch(stack: ExitStack) -> None:
    """MR-1: a decoder that waits for layers which are not computed gets an error, and nothing reads
    the blocks when the call returns. The call returns long before the lease ends."""
    pair = Pair(stack, then=lambda act: act(), lease=3600.0)
    pair.sender.begin([pair.ready])
    pair.sender.layer("layers.0.attn")
    (job,) = pair.sender._transfers["t"].taken
    pair.sender.preempted(["r"])
    assert job.is_released
    with pytest.raises(PrefillFailed, match="needs the pages for another request"):
        pair.pull.wait_ready(10)
    pair.pull.wait_released(10)


def test_preempted_requests_whose_pages_are_computed_are_sent(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_kv_send, "_LEAVING", 100.0)
    pair = Pair(stack, then=lambda act: act(), lease=3600.0)
    pair.sender.begin([pair.ready])
    pair.sender.end()
    pair.sender.preempted(["r"])
    pair.pull.wait_ready(10)
    pair.pull.wait_released(10)


def test_a_device_that_never_gets_there_is_an_error_after_a_lease(
    stack: ExitStack,
) -> None:
    pair = Pair(stack, then=lambda act: None, lease=0.2)
    pair.sender.begin([pair.ready])
    with pytest.raises(NotQuiesced, match="device did not get to preempted requests r"):
        pair.sender.preempted(["r"])
