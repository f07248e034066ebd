"""A prefiller and a decoder as the two ends of a pair: pages go by the KV cache's path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.harness import data, ends
from benchmarks.harness.cases import Case
from benchmarks.suites import R1_LABEL, R1_LAYERS, R1_TOKENS
from fabric_ray import TransferEngine
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
)

_NAP = 20e-6
_LAYERS = 16
_WIDTH = 512


class Shape(NamedTuple):
    """A cache of one group and one tensor; a page of a layer is one page of the case."""

    layers: int
    layer_pages: int
    """Of one operation, in each layer."""
    held_pages: int
    """That there are, in each layer."""
    page_tokens: int
    width: int
    """Elements of a token, 2 bytes each."""

    @staticmethod
    def of(case: Case) -> Shape:
        """How a case's pages are shared among layers."""
        if case.label == R1_LABEL:
            layers, tokens = R1_LAYERS, R1_TOKENS
        else:
            layers, tokens = min(_LAYERS, case.pages), case.bytes // (2 * _WIDTH)
        width = case.bytes // (2 * tokens)
        if 2 * tokens * width != case.bytes or case.pages % layers:
            raise ValueError(
                f"{case.pages} pages of {case.bytes} bytes can't be {layers} layers of "
                f"{width} elements a token; choose multiples"
            )
        held = data.pages_in(case) // layers
        return Shape(layers, case.pages // layers, held, tokens, width)

    @property
    def page_nbytes(self) -> int:
        return 2 * self.page_tokens * self.width

    @property
    def nbytes(self) -> int:
        return self.layers * self.held_pages * self.page_nbytes

    def layout(self) -> CacheLayout:
        page, row = self.page_nbytes, 2 * self.width
        places = tuple(Place(0, layer * self.held_pages * page) for layer in range(self.layers))
        tensor = CacheTensor("latent", 1, 0, 1, self.width, "bfloat16", page, page, row, places)
        layers = tuple(range(self.layers))
        group = CacheGroup("all", layers, self.page_tokens, self.held_pages, (tensor,))
        return CacheLayout("bench", (group,), (self.nbytes,))

    def tables(self, number: int) -> tuple[list[int], list[int]]:
        """Page tables of operation `number`: of the source in order, of the target shuffled."""
        first = number % max(1, self.held_pages // self.layer_pages) * self.layer_pages
        source = list(range(first, first + self.layer_pages))
        target: list[int] = data.order(self.held_pages)[source].tolist()
        return source, target

    def step(self, number: int) -> data.Step:
        """The same for all layers, as places in memory."""
        first = np.arange(self.layers)[:, None] * self.held_pages
        source, target = ((first + np.array(table)).ravel() for table in self.tables(number))
        return data.Step(source, target)


class _End(ends.End):
    """An engine and its cache, made anew when the case is another."""

    _engine: TransferEngine | None = None
    _case: Case | None = None

    def make(self, case: Case) -> bool:
        """False if everything is there from before."""
        if self._case == case:
            return False
        self.close()
        self.shape, self._case = Shape.of(case), case
        name, bind = "prefiller" if self.sends else "decoder", ["127.0.0.1"]
        self._engine = TransferEngine(name=name, transport=case.link, copy_threads=1, bind=bind)
        region = self._engine.alloc(self.shape.nbytes)
        self.memory = region.numpy()
        self.rank = RankCache(self._engine, self.shape.layout(), [region])
        return True

    def check(self, case: Case, operations: int) -> str | None:
        steps = [self.shape.step(number) for number in range(operations)]
        return data.fault(case.bytes, steps, self.memory)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def move(self, operation: Any) -> None:
        raise NotImplementedError("a sample is one pass through all layers")

    def arrive(self, operations: Sequence[Any]) -> None:
        for pull in operations:
            pull.wait_ready(ends.PATIENCE)


class PrefillEnd(_End):
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
            [job] = self._jobs(1)
            job.accept([list(range(self.shape.held_pages))])
            self.sample(case, [job])
            self._touched = True

    def ready(self, case: Case, operations: int) -> Sequence[Job]:
        jobs = self._jobs(operations)
        for number, job in enumerate(jobs, self.moved):
            job.accept([self.shape.tables(number)[0]])
        return jobs

    def sample(self, case: Case, operations: Sequence[Job]) -> None:
        """A pass through all layers of which each is there at once."""
        for job in operations:
            self._prefiller.begin([(job, job.tokens)])
            for layer in range(self.shape.layers):
                self._prefiller.layer_done(layer)
            job.finish()
        for job in operations:
            job.wait_released(ends.PATIENCE)

    def _jobs(self, count: int) -> list[Job]:
        jobs = self._prefiller.take()
        end = time.monotonic() + ends.PATIENCE
        while len(jobs) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(jobs)} of {count} requests came")
            time.sleep(_NAP)
            jobs += self._prefiller.take()
        # The decoder numbers its requests in the order in which it makes them.
        return sorted(jobs, key=lambda job: msgspec.msgpack.decode(job.payload, type=int))


class DecodeEnd(_End):
    def prepare(self, case: Case) -> bytes:
        if self.make(case):
            self._decoder = Decoder([self.rank], terms=Terms())
            self._to: int | None = None
        return b""

    def bind(self, case: Case, description: bytes) -> None:
        if self._to is None:
            self._to = self._decoder.connect(description)
            self._pull(list(range(self.shape.held_pages)), 0).wait_released(ends.PATIENCE)
            self.memory.fill(0)

    def ready(self, case: Case, operations: int) -> Sequence[Pull]:
        numbers = range(self.moved, self.moved + operations)
        self._pulls = [self._pull(self.shape.tables(number)[1], number) for number in numbers]
        return self._pulls

    def settle(self) -> None:
        for pull in self._pulls:
            pull.wait_released(ends.PATIENCE)

    def _pull(self, pages: list[int], number: int) -> Pull:
        assert self._to is not None
        return self._decoder.pull(
            self._to,
            tokens=len(pages) * self.shape.page_tokens,
            tables=[pages],
            payload=msgspec.msgpack.encode(number),
            timeout=ends.PATIENCE,
        )
