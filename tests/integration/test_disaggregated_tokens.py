"""Prefill on one instance, decode on another: token for token what one engine makes of the prompt,
however models, ranks, pages, layouts, chunks and prefixes are chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric_ray import Region, TransferEngine
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import tiny
from fabric_ray.inference.protocols import DecodeRow, PrefillChunk
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools, Tables
from fabric_ray.kvcache import Decoder, Job, Prefiller, RankCache, Terms

PAGES, NEW = 24, 4
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-mla", "tiny-hybrid")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, much so beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def weights(name: str, tp: int) -> Model:
    return Model.random(tiny(name), seed=3, tp=tp, dtype="float64")


@functools.cache
def whole(name: str, prompt: tuple[int, ...]) -> list[int]:
    """What an instance that does both makes of a prompt."""
    engine = TorchEngine(weights(name, 1), CacheSpec(page_tokens=4, pages=64))
    return Generator(engine).run([GenerationRequest(prompt, max_tokens=NEW)])[0]


class Side(msgspec.Struct, frozen=True):
    """How one of the two instances is made."""

    tp: int
    page_tokens: int
    order: str
    buffers: str


class Instance:
    """A model on pages that peers can reach, each rank with an engine of its own."""

    def __init__(self, stack: ExitStack, name: str, model: str, side: Side) -> None:
        engines = [
            stack.enter_context(TransferEngine(name=f"{name}-{rank}")) for rank in range(side.tp)
        ]
        buffers: list[list[Region]] = [[] for _ in engines]

        def allocate(rank: int, nbytes: int) -> Tensor:
            tensor, region = engines[rank].empty((nbytes,), torch.uint8)
            buffers[rank].append(region)
            return tensor

        spec = CacheSpec(
            page_tokens=side.page_tokens,
            pages=PAGES,
            order=side.order,  # type: ignore[arg-type]
            buffers=side.buffers,  # type: ignore[arg-type]
        )
        self.engine = TorchEngine(weights(model, side.tp), spec, allocate=allocate)
        self.terms = Terms(beat=0.1, silence=5.0, tail_nbytes=self.engine.tail.nbytes)
        self.tail, tail = engines[0].empty((self.engine.tail.nbytes,), torch.uint8)
        self.ranks = [
            RankCache(e, self.engine.layout(rank), buffers[rank], tail if rank == 0 else None)
            for rank, e in enumerate(engines)
        ]
        self.pools = CachePools(self.engine.layout(0).groups)


def prefill(
    instance: Instance, prefiller: Prefiller, job: Job, prompt: Sequence[int], chunk: int
) -> None:
    pages = instance.pools.open(prompt, len(prompt))
    job.accept(pages.tables, computed=pages.prefix)
    start = pages.prefix
    while start < len(prompt):
        stop = min(start + chunk, len(prompt))
        prefiller.begin([(job, stop)])
        part = PrefillChunk(prompt[start:stop], start, pages.tables, last=stop == len(prompt))
        tail = instance.engine.prefill(part, prefiller.layer_done)
        start = stop
    assert tail is not None
    instance.engine.write_tail(tail, instance.tail)
    job.finish()
    job.wait_released(20)
    pages.insert(prompt)
    pages.close()


def decode(instance: Instance, prompt: Sequence[int], pages: Tables) -> list[int]:
    tokens = [int(instance.engine.read_tail(instance.tail).logits.argmax())]
    while len(tokens) < NEW:
        row = DecodeRow(tokens[-1], len(prompt) + len(tokens) - 1, pages.tables)
        tokens.append(int(instance.engine.decode([row])[0].argmax()))
    return tokens


def sides() -> st.SearchStrategy[Side]:
    return st.builds(
        Side,
        tp=st.sampled_from((1, 2, 4)),
        page_tokens=st.sampled_from((2, 3, 4, 8)),
        order=st.sampled_from(("heads_first", "tokens_first", "heads_outermost")),
        buffers=st.sampled_from(("one", "split", "per_layer")),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Some of them begin like the one before."""
    token = st.integers(0, 255)
    drawn: list[list[int]] = [draw(st.lists(token, min_size=1, max_size=30))]
    for _ in range(draw(st.integers(0, 2))):
        shared = drawn[-1][: draw(st.integers(0, len(drawn[-1])))]
        drawn.append(shared + draw(st.lists(token, min_size=1, max_size=30 - len(shared) + 1)))
    return drawn


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=sides(),
    target=sides(),
    prompts=prompts(),
    chunk=st.integers(1, 32),
    salt=st.integers(0, 9),
)
def test_tokens_are_those_of_one_engine(
    model: str, source: Side, target: Side, prompts: list[list[int]], chunk: int, salt: int
) -> None:
    with ExitStack() as stack:
        ours = Instance(stack, "prefill", model, source)
        theirs = Instance(stack, "decode", model, target)
        prefiller = stack.enter_context(Prefiller(ours.ranks, terms=ours.terms))
        decoder = stack.enter_context(Decoder(theirs.ranks, terms=theirs.terms))
        to = decoder.connect(prefiller.offer())
        for prompt in prompts:
            pages = theirs.pools.open(prompt, len(prompt) + NEW)
            needed = [
                table[: -(-len(prompt) // group.page_tokens)]
                for table, group in zip(pages.tables, theirs.pools.groups, strict=True)
            ]
            pull = decoder.pull(
                to, tokens=len(prompt), have=pages.prefix, tables=needed, salt=salt, timeout=10
            )
            while not (jobs := prefiller.take()):
                assert pull.error is None, pull.error
            prefill(ours, prefiller, jobs[0], prompt, chunk)
            pull.wait_ready(20)
            assert decode(theirs, prompt, pages) == whole(model, tuple(prompt))
            pull.wait_released(20)
            window = min(g.window or len(prompt) for g in theirs.pools.groups)
            pages.insert(prompt, windowed_from=max(0, len(prompt) - window))
            pages.close()
        assert (decoder.open, prefiller.open) == (0, 0)
        assert ours.pools.idle
        assert theirs.pools.idle
