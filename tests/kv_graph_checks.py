"""Prefill as a captured graph, on whatever its kernels run: it counts layers, whose pages leave by
that."""

from __future__ import annotations

import time
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.kvcache import (
    CacheGroup,
    CacheLayout,
    CacheTensor,
    Decoder,
    Job,
    Place,
    Prefiller,
    RankCache,
    Terms,
)
from tests.latencies import word_of
from tests.stands import Stand, Work

LAYERS, PAGES, PAGE_TOKENS, WIDTH = 4, 16, 4, 64
CHUNK_PAGES = 3
CHUNK = CHUNK_PAGES * PAGE_TOKENS
TAIL = 64


def rank(engine: TransferEngine, stand: Stand) -> tuple[torch.Tensor, Any, RankCache]:
    """A cache in GPU memory, layers x pages x tokens x width, and room for one tail."""
    cache = torch.zeros(LAYERS, PAGES, PAGE_TOKENS, WIDTH, dtype=torch.int64, device=stand.device)
    stand.finish()
    layer, page, token, _ = (8 * stride for stride in cache.stride())
    places = tuple(Place(0, i * layer) for i in range(LAYERS))
    tensor = CacheTensor("latent", 1, 0, 1, WIDTH, "int64", page, page, token, places)
    group = CacheGroup("all", tuple(range(LAYERS)), PAGE_TOKENS, PAGES, (tensor,))
    region, tail = engine.register(cache), engine.alloc(TAIL)
    layout = CacheLayout("captured", (group,), (region.nbytes,))
    return cache, tail, RankCache(engine, layout, [region], tail)


class Captured:
    """One pass through all layers: writes a chunk's pages, and counts each layer."""

    def __init__(self, cache: torch.Tensor, word: torch.Tensor, stand: Stand) -> None:
        self.pages = torch.zeros(CHUNK_PAGES, dtype=torch.int64, device=cache.device)
        self.values = torch.zeros_like(cache[0, :CHUNK_PAGES])
        self._cache, self._word = cache, word
        self._one = torch.ones(1, dtype=torch.int64, device=cache.device)
        self._stand = stand
        # What the graph launches is loaded, and counts nothing.
        cache[0].index_copy_(0, self.pages, self.values * 1)
        word.add_(self._one - 1)
        stand.finish()
        self._again: Work | None = None

    def _step(self) -> None:
        for layer in range(LAYERS):
            self._cache[layer].index_copy_(0, self.pages, self.values * (layer + 1))
            self._word.add_(self._one)

    def replay(self, pages: list[int], values: torch.Tensor) -> None:
        self.pages.copy_(torch.tensor(pages))
        self.values.copy_(values)
        if self._again is None:
            self._again = self._stand.capture(self._step)
            if self._stand.device.type != "cuda":
                # It was done while it was captured.
                return
        self._again()


def asked(prefiller: Prefiller) -> Job:
    deadline = time.monotonic() + 30
    while not (jobs := prefiller.take()):
        assert time.monotonic() < deadline, "no request came"
        time.sleep(0.001)
    return jobs[0]


def check_layers(stand: Stand, transport: str) -> None:
    """IC-2: pages of layers that a captured graph counts arrive as they were computed."""
    torch.empty(1, device=stand.device)
    options = {"transport": transport, "token": b"gpu"}
    terms = Terms(tail_nbytes=TAIL)
    with TransferEngine(**options) as p, TransferEngine(**options) as d:
        (ours, our_tail, source), (theirs, their_tail, target) = rank(p, stand), rank(d, stand)
        with (
            Prefiller([source], terms=terms, device=stand.device.index) as prefiller,
            Decoder([target], terms=terms) as decoder,
        ):
            word = word_of(prefiller.word, stand)
            graph = Captured(ours, word, stand)
            to = decoder.connect(prefiller.offer())
            here, there = [5, 0, 2, 9, 1, 12], [3, 1, 15, 0, 7, 8]
            for round_ in range(3):
                pull = decoder.pull(to, tokens=2 * CHUNK, tables=[there], timeout=30)
                job = asked(prefiller)
                job.accept([here])
                counted = 2 * LAYERS * round_
                chunks = torch.randint(1, 1 << 40, (2, *graph.values.shape), device=stand.device)
                # Both passes are announced and launched before the first is over.
                prefiller.begin([(job, CHUNK)], counted=counted)
                prefiller.begin([(job, 2 * CHUNK)], counted=counted + LAYERS)
                for chunk, values in enumerate(chunks):
                    graph.replay(here[chunk * CHUNK_PAGES : (chunk + 1) * CHUNK_PAGES], values)
                our_tail.numpy()[:] = round_ + 1
                job.finish()
                pull.wait_ready(30)
                for layer in range(LAYERS):
                    want = chunks.flatten(0, 1) * (layer + 1)
                    assert torch.equal(theirs[layer, there], want), f"layer {layer}"
                assert (their_tail.numpy() == round_ + 1).all()
                pull.wait_released(30)
                job.wait_released(30)
                assert prefiller.word.value == counted + 2 * LAYERS
                assert all(times.delivered is not None for times in job.timeline())
            assert (decoder.open, prefiller.open) == (0, 0)
