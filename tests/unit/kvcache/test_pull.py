"""Both ends of a transfer from Python, over real engines in one process."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kvcache import (
    CacheGroup,
    CacheLayout,
    CacheTensor,
    Decoder,
    Job,
    Place,
    Prefiller,
    Pull,
    RankCache,
    Terms,
    errors,
)
from fabric_ray.kvcache.errors import KvCause, KvEvent
from tests.processes import within

LAYERS, HEADS, WIDTH, TAIL = 2, 4, 8, 32


class Node:
    """An instance whose ranks live here; their caches are [layers, pages, heads, tokens, width]."""

    def __init__(self, stack: ExitStack, name: str, ranks: int, page_tokens: int, pages: int):
        held = HEADS // ranks
        self.caches: list[torch.Tensor] = []
        self.ranks: list[RankCache] = []
        for rank in range(ranks):
            engine = stack.enter_context(TransferEngine(name=f"{name}-{rank}"))
            shape = (LAYERS, pages, held, page_tokens, WIDTH)
            cache, region = engine.empty(shape, torch.int64)
            layer, page, head, token, _ = (8 * stride for stride in cache.stride())
            places = tuple(Place(0, i * layer) for i in range(LAYERS))
            tensor = CacheTensor(
                "k", HEADS, rank * held, held, WIDTH, "int64", page, head, token, places
            )
            group = CacheGroup("all", tuple(range(LAYERS)), page_tokens, pages, (tensor,))
            layout = CacheLayout("test", (group,), (region.nbytes,))
            tail = engine.alloc(2 * TAIL) if rank == 0 else None
            self.tail = self.ranks[0].tail if self.ranks else tail
            self.ranks.append(RankCache(engine, layout, [region], tail))
            self.caches.append(cache)


def value(layer: int, head: int, token: int) -> int:
    return 1 + layer + 10 * head + 1000 * token


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


TERMS = Terms(beat=0.05, silence=2.0, tail_nbytes=TAIL)
PATIENT = TERMS.model_copy(update={"silence": 30.0})


def compute(node: Node, layer: int, tokens: range, table: list[int], page_tokens: int) -> None:
    for rank, cache in enumerate(node.caches):
        held = cache.shape[2]
        for token in tokens:
            for head in range(held):
                page = table[token // page_tokens]
                at = value(layer, rank * held + head, token)
                cache[layer, page, head, token % page_tokens] = at


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_pages_of_other_sizes_and_ranks_are_pulled_layer_by_layer(
    stack: ExitStack, sources: int, targets: int
) -> None:
    prefill, decode = Node(stack, "p", sources, 4, 8), Node(stack, "d", targets, 8, 6)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=TERMS))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=TERMS))
    ours, theirs = [5, 0, 2], [3, 1]

    async def serve() -> None:
        async for job in prefiller.jobs():
            assert (job.tokens, job.have, job.payload) == (11, 0, b"the prompt")
            job.accept([ours])
            for chunk in (range(6), range(6, 11)):
                prefiller.begin([(job, chunk.stop)])
                for layer in range(LAYERS):
                    compute(prefill, layer, chunk, ours, 4)
                    prefiller.layer_done(layer)
            assert prefill.tail is not None
            prefill.tail.numpy()[TAIL:] = 7
            job.finish(1)
            await job.released()
            return

    async def main() -> None:
        serving = asyncio.create_task(serve())
        to = decoder.connect(prefiller.offer())
        pull = decoder.pull(to, tokens=11, tables=[theirs], payload=b"the prompt", timeout=20)
        await pull.ready()
        for rank, cache in enumerate(decode.caches):
            held = cache.shape[2]
            for layer in range(LAYERS):
                for head in range(held):
                    for token in range(11):
                        got = cache[layer, theirs[token // 8], head, token % 8]
                        assert (got == value(layer, rank * held + head, token)).all()
        assert decode.tail is not None
        assert (decode.tail.numpy()[:TAIL] == 7).all()
        await pull.released()
        await serving
        assert (decoder.open, prefiller.open) == (0, 0)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("n", [-1, 1 << 32, 1 << 64, -1 << 70])
def test_numbers_that_do_not_fit_are_refused_by_the_call_that_gives_them(
    stack: ExitStack, n: int
) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=TERMS))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=TERMS))
    to = decoder.connect(prefiller.offer())
    with pytest.raises(InvalidArgument, match=rf"^{n} at \[0\]\[1\] is no .* index"):
        decoder.pull(to, tokens=8, tables=[[0, n]])
    asked = {"tokens": 8, "have": 0, "tail_slot": 0, "salt": 0}
    for field in ("tokens", "have", "tail_slot", "salt"):
        # Salts and tokens have 64 bits.
        if n < 0 or n >= 1 << 64 or field == "tail_slot":
            with pytest.raises(InvalidArgument, match=f"^{n} is no"):
                decoder.pull(to, tables=[[0, 1]], **asked | {field: n})
    pull = decoder.pull(to, tokens=8, tables=[[0, 1]])

    async def accept() -> None:
        async for job in prefiller.jobs():
            with pytest.raises(InvalidArgument, match=rf"^{n} at \[0\]\[0\] is no .* index"):
                job.accept([[n, 1]])
            with pytest.raises(InvalidArgument, match=f"^{n} is no"):
                job.finish(n)
            job.fail("over")
            return

    asyncio.run(asyncio.wait_for(accept(), 30))
    with pytest.raises(errors.KvError):
        asyncio.run(pull.ready())
    if n < 0 or n >= 1 << 64:
        for call in (decoder.is_connected, decoder.disconnect):
            with pytest.raises(InvalidArgument, match=f"^{n} is no"):
                call(n)


def test_what_is_wrong_with_a_request_is_said_before_anything_is_sent(stack: ExitStack) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=TERMS))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=TERMS))
    to = decoder.connect(prefiller.offer())
    for wrong, text in [
        ({"tokens": 8, "tables": [[0]]}, "fill 2"),
        ({"tokens": 8, "tables": [[0, 8]]}, "page 8 of 8"),
        ({"tokens": 8, "tables": [[3, 3]]}, "page 3 twice"),
        ({"tokens": 8, "tables": [[0, 1]], "have": 3}, "whole pages"),
        ({"tokens": 8, "tables": [[0, 1]], "have": 8}, "one at least"),
        ({"tokens": 8, "tables": [[0, 1]], "tail_slot": 2}, "no slot 2"),
        ({"tokens": 8, "tables": [[0, 1]], "payload": bytes(1 << 20)}, "max_message"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            decoder.pull(to, **wrong)
    assert (decoder.open, prefiller.open) == (0, 0)


def test_pages_that_do_not_fit_are_refused_with_all_that_differs(stack: ExitStack) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    rank = decode.ranks[0]
    group = rank.layout.groups[0]
    tensor = msgspec.structs.replace(group.tensors[0], dtype="float64")
    group = msgspec.structs.replace(group, tensors=(tensor,), window=12)
    layout = msgspec.structs.replace(rank.layout, model="other", groups=(group,))
    unlike = RankCache(rank.engine, layout, rank.buffers, rank.tail)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=TERMS))
    decoder = stack.enter_context(Decoder([unlike], terms=TERMS))
    with pytest.raises(errors.LayoutMismatch) as error:
        decoder.connect(prefiller.offer())
    for word in ("other", "float64", "window"):
        assert word in str(error.value)


def test_ends_that_are_garbage_collected_disconnect(stack: ExitStack) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller, decoder = Prefiller(prefill.ranks, terms=TERMS), Decoder(decode.ranks, terms=TERMS)
    pull = decoder.pull(decoder.connect(prefiller.offer()), tokens=8, tables=[[0, 1]])
    gone = weakref.ref(prefiller)
    del prefiller
    gc.collect()
    assert gone() is None
    with pytest.raises(errors.PrefillerLost):
        pull.wait_ready(10)
    pull.wait_released(10)
    gone = weakref.ref(decoder)
    del decoder, pull
    gc.collect()
    assert gone() is None


def test_a_reader_that_left_does_not_take_the_next_one_s_word_along(stack: ExitStack) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=PATIENT))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=PATIENT))
    to = decoder.connect(prefiller.offer())

    async def main() -> None:
        decoder.pull(to, tokens=8, tables=[[0, 1]])
        async for job in prefiller.jobs():
            job.fail("the first")
            break
        # The loop ends that generator behind the next reader's first wait.
        second = asyncio.ensure_future(anext(prefiller.jobs()))
        await asyncio.sleep(0.05)
        gc.collect()
        await asyncio.sleep(0.05)
        decoder.pull(to, tokens=8, tables=[[2, 3]])
        (await second).fail("the second")

    asyncio.run(asyncio.wait_for(main(), 30))


def test_leases_are_renewed_by_one_heartbeat_and_by_open_sessions_only(stack: ExitStack) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=PATIENT))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=PATIENT))
    renewed: list[int] = []
    prefiller.on_renewal(renewed.extend)
    to = decoder.connect(prefiller.offer())
    leases = [2**64 - 1, *range(300)]
    decoder.renew(to, leases)
    within(10, "the heartbeat", lambda: sorted(renewed) == sorted(leases))
    decoder.renew(to, [5])
    within(10, "the next one", lambda: renewed[len(leases) :] == [5])
    decoder.disconnect(to)
    decoder.renew(to, [999])
    with pytest.raises(InvalidArgument, match="too large"):
        decoder.renew(to, [2**64])
    time.sleep(4 * PATIENT.beat)
    assert 999 not in renewed


def test_events_before_the_pull_returns_are_not_overtaken(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
    prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=PATIENT))
    decoder = stack.enter_context(Decoder(decode.ranks, terms=PATIENT))
    to = decoder.connect(prefiller.offer())
    first, jobs = decoder.pull(to, tokens=8, tables=[[0, 1]]), list[Job]()
    within(20, "the request", lambda: bool(jobs.extend(prefiller.take()) or jobs))
    jobs[0].fail("it opened the session")
    first.wait_released(20)
    native, told = decoder._native, list[str]()

    class Cancelled:
        """The native decoder, whose requests have failed before their numbers are known."""

        def request(self, *args: Any, **kwargs: Any) -> int:
            number: int = native.request(*args, **kwargs)
            native.cancel(number)
            within(20, "the failure", lambda: number in decoder._early)
            return number

    report = Pull._on_event

    def paused(pull: Pull, event: KvEvent, cause: KvCause, text: str) -> None:
        if event == "failed":
            # Meanwhile the callback thread reports that the prefiller has confirmed.
            within(20, "the release", lambda: pull.is_released or bool(decoder._early))
        report(pull, event, cause, text)
        told.append(event)

    monkeypatch.setattr(Pull, "_on_event", paused)
    monkeypatch.setattr(decoder, "_native", Cancelled())
    pull = decoder.pull(to, tokens=8, tables=[[0, 1]])
    monkeypatch.setattr(decoder, "_native", native)
    pull.wait_released(20)
    assert told == ["failed", "released"]
    assert (decoder._early, decoder._pulls) == ({}, {})
