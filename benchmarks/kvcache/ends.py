"""A prefiller and a decoder as the two ends of a harness pair: pages go by the KV cache's path."""

from __future__ import annotations

import time

import msgspec

from benchmarks.contenders.fabric import unusable
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Family
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import PATIENCE, Role, Stamps, Sync
from benchmarks.kvcache.shape import Shape
from fabric_ray import Region, TransferEngine
from fabric_ray.kvcache import Decoder, Job, Prefiller, Pull, RankCache, Terms

_NAP = 20e-6


class KvPages(PairContender):
    """From the first layer that is said to be computed to the last page at the decoder. Requests
    are made, and accepted, before the clock starts, as peers' transfers are."""

    name = "fabric-kv"
    family: Family = "ours"
    obtain = "make setup"
    sender = "benchmarks.kvcache.ends:PrefillEnd"
    target = "benchmarks.kvcache.ends:DecodeEnd"
    pausable = False  # both ends park by themselves, and beats go on

    def available(self) -> str | None:
        return unusable()

    def supports(self, case: Case) -> bool:
        return case.operation == "pages" and case.suite == "kv"

    def describe(self, case: Case) -> str:
        layers = Shape.of(case).layers
        return f"Prefiller and Decoder from Python, {layers} layers, one copying thread"


class _End(Role):
    """An engine and its cache, made anew when the case is another."""

    name: str

    def __init__(self, sync: Sync) -> None:
        super().__init__(sync)
        self._engine: TransferEngine | None = None
        self._case: Case | None = None

    def open(self) -> bytes:
        return b""

    def connect(self, peer: bytes) -> None:
        """The decoder's first word connects."""

    def make(self, case: Case) -> bool:
        """False if everything is there from before."""
        if self._case == case:
            return False
        self.close()
        self.shape, self._case = Shape.of(case), case
        self._engine = TransferEngine(
            name=self.name, transport=case.link, copy_threads=1, bind=["127.0.0.1"]
        )
        self._region: Region = self._engine.alloc(self.shape.nbytes)
        self.memory = self._region.numpy()
        self.rank = RankCache(self._engine, self.shape.layout(), [self._region])
        return True

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class PrefillEnd(_End):
    name = "prefiller"
    _touched = False

    def prepare(self, case: Case) -> bytes:
        if self.make(case):
            self._prefiller = Prefiller([self.rank], terms=Terms())
            self._touched = False
        return self._prefiller.offer()

    def bind(self, case: Case, description: bytes) -> None:
        """Sends all pages once, as a long-lived peer will have; the target is laid out anew before
        it is compared."""
        if not self._touched:
            pages = list(range(self.shape.held_pages))
            self._send(self._jobs(1)[0], pages)
            self._touched = True

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        starts: list[int] = []
        for _ in range(samples):
            self.sync.await_ready()
            jobs = self._jobs(operations)
            for job in jobs:
                job.accept([self.shape.tables(self.moved)[0]])
                self.moved += 1
            starts.append(time.monotonic_ns())
            for job in jobs:
                self._push(job)
            for job in jobs:
                job.wait_released(PATIENCE)
            self.sync.finished()
        return Stamps(starts=starts)

    def _send(self, job: Job, pages: list[int]) -> None:
        job.accept([pages])
        self._push(job)
        job.wait_released(PATIENCE)

    def _push(self, job: Job) -> None:
        """A pass through all layers of which each is there at once."""
        self._prefiller.begin([(job, job.tokens)])
        for layer in range(self.shape.layers):
            self._prefiller.layer_done(layer)
        job.finish()

    def _jobs(self, count: int) -> list[Job]:
        jobs = self._prefiller.take()
        end = time.monotonic() + PATIENCE
        while len(jobs) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(jobs)} of {count} requests came")
            time.sleep(_NAP)
            jobs += self._prefiller.take()
        # The decoder numbers its requests in the order in which it makes them.
        return sorted(jobs, key=lambda job: msgspec.msgpack.decode(job.payload, type=int))


class DecodeEnd(_End):
    name = "decoder"

    def prepare(self, case: Case) -> bytes:
        if self.make(case):
            self._decoder = Decoder([self.rank], terms=Terms())
            self._to: int | None = None
        return b""

    def bind(self, case: Case, description: bytes) -> None:
        if self._to is None:
            self._to = self._decoder.connect(description)
            pages = list(range(self.shape.held_pages))
            self._pull(pages).wait_released(PATIENCE)
            self.memory.fill(0)

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        ends: list[int] = []
        for _ in range(samples):
            pulls: list[Pull] = []
            for _ in range(operations):
                pulls.append(self._pull(self.shape.tables(self.moved)[1]))
                self.moved += 1
            self.sync.ready()
            for pull in pulls:
                pull.wait_ready(PATIENCE)
            ends.append(time.monotonic_ns())
            for pull in pulls:
                pull.wait_released(PATIENCE)
            self.sync.await_finished()
        return Stamps(ends=ends)

    def check(self, case: Case, operations: int) -> str | None:
        return self.shape.fault(operations, self.memory)

    def _pull(self, pages: list[int]) -> Pull:
        assert self._to is not None
        return self._decoder.pull(
            self._to,
            tokens=len(pages) * self.shape.page_tokens,
            tables=[pages],
            payload=msgspec.msgpack.encode(self.moved),
            timeout=PATIENCE,
        )
