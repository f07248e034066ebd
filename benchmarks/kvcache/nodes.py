"""An inference engine whose cache lies in memory of a transfer engine, and a prefiller on it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import torch

from fabric_ray import Region, TransferEngine
from fabric_ray.errors import Cancelled
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.errors import OutOfPages
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.model import Model
from fabric_ray.inference.protocols import PrefillChunk
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools, Tables
from fabric_ray.kvcache import Job, Prefiller, RankCache, Terms
from fabric_ray.models.config import ModelConfig

SLOTS = 16
"""Tails that may be on their way at a time."""


class Setup(msgspec.Struct, frozen=True):
    """What all processes of a run agree on."""

    config: ModelConfig
    spec: CacheSpec
    dtype: str
    chunk_tokens: int
    transport: str = "shm"
    beat: float = 0.1
    silence: float = 5.0


class Asked(msgspec.Struct, frozen=True):
    """What a decoder tells the engine behind a prefiller."""

    prompt: list[int]
    computed: bool = False
    """Whether to send pages as they are, without computing them: what the transfer costs alone."""


class Trace(msgspec.Struct):
    """Monotonic nanoseconds of one prefill."""

    accepted: int = 0
    passes: list[list[int]] = []
    """Of each pass: its begin, then the end of every layer."""
    computed: int = 0
    """When the engine has returned, logits included."""


class Instance:
    """An engine and its cache.

    Args:
        setup: shapes.
        name: of the transfer engine.
        slots: for tails.
    """

    def __init__(self, setup: Setup, name: str, slots: int) -> None:
        model = Model.random(setup.config, dtype=setup.dtype)  # type: ignore[arg-type]
        self.transfer = TransferEngine(name=name, transport=setup.transport, bind=["127.0.0.1"])
        regions: list[Region] = []

        def allocate(rank: int, nbytes: int) -> torch.Tensor:
            regions.append(self.transfer.alloc(nbytes))
            return torch.from_numpy(regions[-1].numpy())

        self.engine = TorchEngine(model, setup.spec, allocate=allocate)
        self.pools = CachePools(self.engine.layout(0).groups)
        nbytes = self.engine.tail.nbytes
        self._tail = self.transfer.alloc(slots * nbytes)
        tails = torch.from_numpy(self._tail.numpy())
        self.tails = [tails[i * nbytes : (i + 1) * nbytes] for i in range(slots)]
        self.rank = RankCache(self.transfer, self.engine.layout(0), regions, self._tail)
        self.terms = Terms(beat=setup.beat, silence=setup.silence, tail_nbytes=nbytes)


class PrefillNode:
    """A prefiller's process: computes prompts one after another, on a thread of its own."""

    def __init__(self, setup: Setup, name: str = "prefiller") -> None:
        self._setup = setup
        self._node = Instance(setup, name, SLOTS)
        self._prefiller = Prefiller([self._node.rank], name=name, terms=self._node.terms)
        self._free = list(range(SLOTS))
        self._trace = Trace()
        self._computed = 0
        self._loop = asyncio.new_event_loop()
        self._freed = asyncio.Event()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def offer(self) -> bytes:
        return self._prefiller.offer()

    def trace(self) -> Trace:
        """Of the last prefill."""
        return self._trace

    def state(self) -> dict[str, Any]:
        """Whether anything is left of any request."""
        if self._failure is not None:
            raise RuntimeError("the prefiller's thread has ended") from self._failure
        return {
            "open": self._prefiller.open,
            "idle": self._node.pools.idle and len(self._free) == SLOTS,
            "computed": self._computed,
        }

    def whole(self, prompt: list[int]) -> dict[str, Any]:
        """The same engine, not disaggregated: seconds to the first token and of the step after it,
        and both tokens. To be called when no request is open."""
        generator = Generator(self._node.engine, chunk_tokens=self._setup.chunk_tokens)
        start = time.monotonic_ns()
        generator.submit(GenerationRequest(prompt, max_tokens=2))
        tokens: list[int] = []
        stamps: list[int] = []
        while generator.busy:
            tokens += [emitted.token for emitted in generator.step()]
            stamps += [time.monotonic_ns()] * (len(tokens) - len(stamps))
        first, second = stamps
        return {
            "tokens": tokens,
            "first": (first - start) / 1e9,
            "step": (second - first) / 1e9,
        }

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            raise

    async def _serve(self) -> None:
        async for job in self._prefiller.jobs():
            try:
                await self._prefill(job)
            except Cancelled:
                continue  # its pages come back when it is released

    async def _prefill(self, job: Job) -> None:
        asked = msgspec.msgpack.decode(job.payload, type=Asked)
        tables = await self._open(asked.prompt)
        slot = self._free.pop()
        job.on_release(lambda: self._loop.call_soon_threadsafe(self._release, tables, slot))
        self._trace = trace = Trace(accepted=time.monotonic_ns())
        if asked.computed:
            job.accept(tables.tables, computed=len(asked.prompt))
        else:
            job.accept(tables.tables)
            self._compute(job, asked.prompt, tables, slot, trace)
        trace.computed = time.monotonic_ns()
        job.finish(slot)

    def _compute(
        self, job: Job, prompt: list[int], tables: Tables, slot: int, trace: Trace
    ) -> None:
        engine, prefiller = self._node.engine, self._prefiller

        def on_layer(layer: int) -> None:
            prefiller.layer_done(layer)
            stamps.append(time.monotonic_ns())

        for start in range(0, len(prompt), self._setup.chunk_tokens):
            if job.stopped:
                return
            tokens = prompt[start : start + self._setup.chunk_tokens]
            end = start + len(tokens)
            stamps = [time.monotonic_ns()]
            prefiller.begin([(job, end)])
            chunk = PrefillChunk(tokens, start, tables.tables, last=end == len(prompt))
            tail = engine.prefill(chunk, on_layer)
            trace.passes.append(stamps)
            if tail is not None:
                engine.write_tail(tail, self._node.tails[slot])
        self._computed += 1

    async def _open(self, prompt: list[int]) -> Tables:
        while True:
            self._freed.clear()
            if self._free:
                try:
                    return self._node.pools.open(prompt, len(prompt), most=0)
                except OutOfPages:
                    pass  # until a request before it is released
            await self._freed.wait()

    def _release(self, tables: Tables, slot: int) -> None:
        tables.close()
        self._free.append(slot)
        self._freed.set()
