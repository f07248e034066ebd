"""Every public call of both ends of KV transfer from many threads at once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pytest
import torch

from fabric_ray.errors import Cancelled, InvalidArgument, Stale
from fabric_ray.kvcache import Decoder, Job, Prefiller, Pull, errors
from tests.at_once import THREADS, at_once, unused
from tests.unit.kvcache.test_pull import LAYERS, PATIENT, TAIL, Node

ROUNDS = 3
PAGE_TOKENS, TOKENS = 4, 8


@dataclass
class World:
    """What all threads use; each has two pages of either end to itself."""

    prefill: Node
    decode: Node
    prefiller: Prefiller
    decoder: Decoder
    to: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Of passes: a model computes one after the other."""
    renewed: set[int] = field(default_factory=set)
    """Leases."""

    def serve(self) -> None:
        """Answers what has come, as a payload of a thread's number and a way asks."""
        for job in self.prefiller.take():
            with suppress(Cancelled):  # its decoder may have given it up meanwhile
                ANSWERS[job.payload[1]](self, job, pages_of(job.payload[0]))

    def ask(self, number: int, way: int) -> Pull:
        self.decode.caches[0][:, pages_of(number)] = 0
        return self.decoder.pull(
            self.to,
            tokens=TOKENS,
            tables=[pages_of(number)],
            tail_slot=number % 2,
            payload=bytes([number, way]),
            timeout=200,
        )

    def until(self, what: Callable[[], bool]) -> None:
        """Serves as long as this thread has to wait."""
        end = time.monotonic() + 200
        while not what():
            assert time.monotonic() < end, "it never came"
            self.serve()
            time.sleep(0.001)

    def arrived(self, number: int) -> bool:
        mine = pages_of(number)
        return torch.equal(self.decode.caches[0][:, mine], self.prefill.caches[0][:, mine])


def pages_of(number: int) -> list[int]:
    return [2 * number, 2 * number + 1]


def look(job: Job) -> None:
    job.on_stop(lambda cause: None)
    job.on_release(lambda: None)
    assert len(job.timeline()) in (0, LAYERS)
    assert job.stopped == (job.cause is not None)


def computed_before(w: World, job: Job, table: list[int]) -> None:
    job.accept([table], computed=TOKENS)
    look(job)
    job.finish(job.payload[0] % 2)


def layer_by_layer(w: World, job: Job, table: list[int]) -> None:
    job.accept([table])
    with w.turn:
        w.prefiller.begin([(job, TOKENS)])
        for layer in range(LAYERS):
            w.prefiller.layer_done(layer)
    job.finish(job.payload[0] % 2)
    look(job)


def failing(w: World, job: Job, table: list[int]) -> None:
    job.fail("no room")


def refusing(w: World, job: Job, table: list[int]) -> None:
    job.refuse(errors.RefusalReason.BUSY, "too many requests")


def never(w: World, job: Job, table: list[int]) -> None:
    job.accept([table])
    look(job)


ANSWERS = [computed_before, layer_by_layer, failing, never, refusing]


def pulled(w: World, number: int, way: int) -> None:
    pull = w.ask(number, way)
    w.until(lambda: pull.is_ready or pull.error is not None)
    pull.wait_ready(1)
    assert w.arrived(number), "IC-2: it was ready before its bytes were there"
    released = threading.Event()
    pull.on_release(released.set)
    w.until(lambda: pull.is_released)
    pull.wait_released(1)
    assert released.wait(60)

    async def both() -> None:
        await pull.ready()
        await pull.released()

    asyncio.run(both())


def whole(w: World, number: int) -> None:
    pulled(w, number, 0)


def layers(w: World, number: int) -> None:
    pulled(w, number, 1)


def failed(w: World, number: int) -> None:
    pull = w.ask(number, 2)
    w.until(lambda: pull.is_released)
    with pytest.raises(errors.PrefillFailed, match="no room"):
        pull.wait_ready(60)


def cancelled(w: World, number: int) -> None:
    pull = w.ask(number, 3)
    pull.cancel()
    w.until(lambda: pull.is_released)
    assert isinstance(pull.error, errors.PullCancelled)


def refused(w: World, number: int) -> None:
    pull = w.ask(number, 4)
    w.until(lambda: pull.is_released)
    with pytest.raises(errors.PullRefused) as raised:
        pull.wait_ready(60)
    assert raised.value.reason is errors.RefusalReason.BUSY


def another_session(w: World, number: int) -> None:
    to = w.decoder.connect(w.prefiller.offer())
    assert w.decoder.is_connected(to)
    w.decoder.disconnect(to)
    assert not w.decoder.is_connected(to)
    with pytest.raises(Stale):
        w.decoder.pull(to, tokens=TOKENS, tables=[pages_of(number)])


def renewing(w: World, number: int) -> None:
    w.prefiller.on_renewal(w.renewed.update)
    w.decoder.renew(w.to, [number])
    w.until(lambda: bool(w.renewed))  # until the next heartbeat the last call of all threads counts


def wrong(w: World, number: int) -> None:
    with pytest.raises(InvalidArgument):
        w.decoder.pull(w.to, tokens=TOKENS, tables=[[0]])


CALLS = [whole, layers, failed, cancelled, refused, another_session, renewing, wrong]
# They end what all others use; `jobs` is for one reader, and as `take`; a job's release is awaited
# once.
APART = {"Decoder.close", "Prefiller.close", "Prefiller.jobs", "Job.released", "Job.wait_released"}


def test_every_public_call_of_both_ends_is_made() -> None:
    assert unused(__file__, Decoder, Pull, Prefiller, Job) <= APART


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        prefill = Node(stack, "p", 1, PAGE_TOKENS, 2 * THREADS)
        decode = Node(stack, "d", 1, PAGE_TOKENS, 2 * THREADS)
        cache = prefill.caches[0]
        cache.copy_(torch.arange(1, cache.numel() + 1).reshape(cache.shape))
        assert prefill.tail is not None
        prefill.tail.numpy()[:] = 7
        prefiller = stack.enter_context(Prefiller(prefill.ranks, terms=PATIENT))
        decoder = stack.enter_context(Decoder(decode.ranks, terms=PATIENT))
        yield World(prefill, decode, prefiller, decoder, decoder.connect(prefiller.offer()))


def test_ic_2_both_ends_of_kv_transfer_from_32_threads_at_once(world: World) -> None:
    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            for call in draw.sample(CALLS, len(CALLS)):
                call(world, number)

    at_once(work)
    world.until(lambda: world.prefiller.open == 0)
    assert world.decoder.open == 0
    assert world.decode.tail is not None
    assert (world.decode.tail.numpy()[: 2 * TAIL] == 7).all()


def test_closing_a_decoder_while_threads_ask_ends_every_request_in_words(world: World) -> None:
    asked = threading.Semaphore(0)

    def work(number: int) -> None:
        if number == 0:
            for _ in range(THREADS - 1):
                assert asked.acquire(timeout=120)
            world.decoder.close()
            return
        pulls = []
        try:
            while True:
                pulls.append(world.ask(number, 3))
                asked.release()
                pulls[-1].cancel()
        except errors.FabricError:
            asked.release()
        for pull in pulls:
            world.until(lambda pull=pull: pull.is_released)
            assert isinstance(pull.error, errors.KvError)

    at_once(work)
