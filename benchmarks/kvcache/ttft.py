"""Time to the first token, disaggregated and not, over lengths of the prompt (fabric-lib, table 3).

A prefiller and a decoder are processes of their own, over shared memory. The same engine, not
disaggregated, runs in the prefiller's process while nothing else does; both take turns.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from fabric_ray import Region, TransferEngine
from fabric_ray.bench.child import Child
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import Row, RowHeader, row_of_turns
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.model import Model
from fabric_ray.inference.protocols import DecodeRow, PrefillChunk
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools, Tables
from fabric_ray.kvcache import Decoder, Job, Prefiller, RankCache, Terms
from fabric_ray.models.config import ModelConfig

AIM = 0.05
"""Of the time not disaggregated, beside one step of decoding."""

MODEL = ModelConfig(
    kind="llama",
    vocab=8192,
    hidden=512,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    dtype="float32",
)
"""32 KiB a page of 16 tokens: heads first, keys and values side by side."""

_PAGE_TOKENS = 16
_PATIENCE = 120.0


class Setup(msgspec.Struct, frozen=True):
    """What both processes agree on."""

    config: ModelConfig
    spec: CacheSpec
    chunk_tokens: int


class Asked(msgspec.Struct, frozen=True):
    """What the decoder tells the engine behind the prefiller."""

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


class _Instance:
    """An engine whose cache, with one tail, lies in memory of a transfer engine."""

    def __init__(self, setup: Setup, name: str) -> None:
        self._setup = setup
        transfer = TransferEngine(name=name, transport="shm", bind=["127.0.0.1"])
        regions: list[Region] = []

        def allocate(rank: int, nbytes: int) -> torch.Tensor:
            regions.append(transfer.alloc(nbytes))
            return torch.from_numpy(regions[-1].numpy())

        model = Model.random(setup.config, dtype="float32")
        self._engine = TorchEngine(model, setup.spec, allocate=allocate)
        self._pools = CachePools(self._engine.layout(0).groups)
        nbytes = self._engine.tail.nbytes
        tail = transfer.alloc(nbytes)
        self._tail = torch.from_numpy(tail.numpy())
        self._rank = RankCache(transfer, self._engine.layout(0), regions, tail)
        self._terms = Terms(beat=0.1, silence=5.0, tail_nbytes=nbytes)


class PrefillNode(_Instance):
    """A prefiller's process: computes prompts one after another, on a thread of its own."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "prefiller")
        self._prefiller = Prefiller([self._rank], terms=self._terms)
        self._trace = Trace()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    def offer(self) -> bytes:
        return self._prefiller.offer()

    def trace(self) -> Trace:
        """Of the last prefill."""
        return self._trace

    def idle(self) -> bool:
        return self._pools.idle

    def whole(self, prompt: list[int]) -> dict[str, Any]:
        """The same engine, not disaggregated: seconds to the first token and of the step after it,
        and both tokens. To be called when no request is open."""
        generator = Generator(self._engine, chunk_tokens=self._setup.chunk_tokens)
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

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async for job in self._prefiller.jobs():
            asked = msgspec.msgpack.decode(job.payload, type=Asked)
            tables = self._pools.open(asked.prompt, len(asked.prompt), most=0)
            job.on_release(lambda tables=tables: loop.call_soon_threadsafe(tables.close))  # type: ignore[misc]
            self._trace = trace = Trace(accepted=time.monotonic_ns())
            if asked.computed:
                job.accept(tables.tables, computed=len(asked.prompt))
            else:
                job.accept(tables.tables)
                self._compute(job, asked.prompt, tables, trace)
            trace.computed = time.monotonic_ns()
            job.finish(0)

    def _compute(self, job: Job, prompt: list[int], tables: Tables, trace: Trace) -> None:
        def on_layer(layer: int) -> None:
            self._prefiller.layer_done(layer)
            stamps.append(time.monotonic_ns())

        for start in range(0, len(prompt), self._setup.chunk_tokens):
            tokens = prompt[start : start + self._setup.chunk_tokens]
            end = start + len(tokens)
            stamps = [time.monotonic_ns()]
            self._prefiller.begin([(job, end)])
            chunk = PrefillChunk(tokens, start, tables.tables, last=end == len(prompt))
            tail = self._engine.prefill(chunk, on_layer)
            trace.passes.append(stamps)
            if tail is not None:
                self._engine.write_tail(tail, self._tail)


class DecodeNode(_Instance):
    """A decoder's process: one request at a time."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "decoder")
        self._decoder = Decoder([self._rank], terms=self._terms)

    def meet(self, offer: bytes) -> None:
        self._to = self._decoder.connect(offer)

    def first_token(self, prompt: list[int], computed: bool) -> dict[str, Any]:
        """Asks for a prompt, and decodes one step after its first token. Times are monotonic
        nanoseconds."""
        tables = self._pools.open(prompt, len(prompt) + 1, most=0)
        pages = [
            table[: -(-len(prompt) // group.page_tokens)]
            for table, group in zip(tables.tables, self._pools.groups, strict=True)
        ]
        start = time.monotonic_ns()
        payload = msgspec.msgpack.encode(Asked(prompt, computed))
        pull = self._decoder.pull(
            self._to, tokens=len(prompt), tables=pages, payload=payload, timeout=_PATIENCE
        )
        pull.wait_ready(_PATIENCE)
        ready = time.monotonic_ns()
        tail = self._engine.read_tail(self._tail)
        tokens = [] if computed else [sample(tail.logits, Sampling(), 0)]
        first = time.monotonic_ns()
        if tokens:
            row = DecodeRow(tokens[0], len(prompt), tables.tables)
            tokens.append(sample(self._engine.decode([row])[0], Sampling(), 1))
        second = time.monotonic_ns()
        pull.wait_released(_PATIENCE)
        tables.close()
        return {"tokens": tokens, "stamps": [start, ready, first, second]}


class Turn(msgspec.Struct, frozen=True):
    """One prompt both ways, in seconds."""

    whole: float
    split: float
    step: float
    compute: float
    """Of a layer in a pass."""
    exposed: float
    """From the end of computing to the decoder's knowing that all is there."""
    asked: float
    """From the decoder's request to the prefiller's taking it."""
    moved: float
    """Of a layer, all its pages, alone."""


def ttft(
    lengths: Sequence[int],
    turns: int,
    results: Results,
    *,
    chunk_tokens: int = 1024,
    threads: int = 1,
    config: ModelConfig = MODEL,
) -> None:
    """One row for each length.

    Args:
        lengths: tokens of the prompts.
        turns: of each length; prompts differ.
        results: where rows go.
        chunk_tokens: of a pass.
        threads: of torch in each process.
        config: the model, of random weights.

    Raises:
        RuntimeError: both ways gave different tokens.
    """
    # Room for two: a prompt may come before the one before it is released.
    pages = 2 * (-(-(max(lengths) + 1) // _PAGE_TOKENS) + 1)
    setup = Setup(config, CacheSpec(page_tokens=_PAGE_TOKENS, pages=pages), chunk_tokens)
    env = {"OMP_NUM_THREADS": str(threads)}
    children: list[Child] = []
    try:
        for role in ("PrefillNode", "DecodeNode"):
            children.append(Child(f"benchmarks.kvcache.ttft:{role}", setup, env=env))
        prefill, decode = children
        for child in children:
            child.end_call()
        decode.call("meet", prefill.call("offer"))
        drawn = random.Random(1)
        for length in (one for one in lengths if not results.has(f"ttft/{one} tokens")):
            found: list[Turn] = []
            try:
                for turn in range(turns + 1):
                    results.say(f"{length} tokens, turn {turn} of {turns}")
                    prompt = [drawn.randrange(config.vocab) for _ in range(length)]
                    one = _turn(prefill, decode, prompt, config.layers, turn % 2 == 0)
                    if turn:  # the first warms up
                        found.append(one)
            finally:
                if found:
                    complete = len(found) == turns
                    results.add(_row(length, found, chunk_tokens, complete=complete))
    finally:
        for child in children:
            child.kill()


def _turn(prefill: Child, decode: Child, prompt: list[int], layers: int, whole_first: bool) -> Turn:
    whole = prefill.call("whole", prompt) if whole_first else None
    split = decode.call("first_token", prompt, False)
    trace = prefill.call("trace")
    alone = decode.call("first_token", prompt, True)
    sent = prefill.call("trace")
    _settle(prefill)
    if whole is None:
        whole = prefill.call("whole", prompt)
    if whole["tokens"] != split["tokens"]:
        raise RuntimeError(
            f"a prompt of {len(prompt)} tokens went on with {split['tokens']} disaggregated and "
            f"with {whole['tokens']} not"
        )
    start, ready, first, second = split["stamps"]
    compute = [(stamps[-1] - stamps[0]) / layers / 1e9 for stamps in trace.passes]
    return Turn(
        whole=whole["first"],
        split=(first - start) / 1e9,
        step=(second - first) / 1e9,
        compute=statistics.fmean(compute),
        exposed=(ready - trace.computed) / 1e9,
        asked=(trace.accepted - start) / 1e9,
        moved=(alone["stamps"][1] - sent.accepted) / layers / 1e9,
    )


def _settle(prefill: Child) -> None:
    end = time.monotonic() + _PATIENCE
    while not prefill.call("idle"):
        if time.monotonic() > end:
            raise RuntimeError("the prefiller holds pages of a request that is over")
        time.sleep(1e-3)


def _row(length: int, turns: Sequence[Turn], chunk_tokens: int, *, complete: bool) -> Row:
    """The floor is the engine that isn't disaggregated."""
    of = {name: [getattr(turn, name) for turn in turns] for name in Turn.__struct_fields__}
    ms = {name: 1e3 * statistics.median(values) for name, values in of.items()}
    details = {
        "difference ms": 1e3 * statistics.median(turn.split - turn.whole for turn in turns),
        "one step ms": ms["step"],
        "compute / layer ms": ms["compute"],
        "transfer / layer, alone ms": ms["moved"],
        "asking ms": ms["asked"],
        "not hidden ms": ms["exposed"],
        "of it": f"{(ms['asked'] + ms['exposed']) / ms['split']:.2%}",
        "steps": -(-length // chunk_tokens),
        "pages": -(-min(length, chunk_tokens) // _PAGE_TOKENS),
    }
    header = RowHeader(key=f"ttft/{length} tokens", unit="ms", aim=f"+ one step and {AIM:.0%}")
    taken = {"disaggregated": ("ours", of["split"]), "whole": ("floor", of["whole"])}
    return row_of_turns(header, taken, {"disaggregated": details}, complete=complete)
