"""Time to the first token, disaggregated and not, over lengths of the prompt (fabric-lib, table 3).

A prefiller and a decoder are processes of their own, over shared memory. The same engine, not
disaggregated, runs in the prefiller's process while nothing else does; both take turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.harness.child import Child
from benchmarks.harness.processes import adopt_orphans
from benchmarks.kvcache.nodes import Asked, Instance, Setup
from benchmarks.sheets import Sheet, keeping, verdict
from fabric_ray.inference.protocols import DecodeRow
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.kvcache import Decoder
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


class DecodeNode:
    """A decoder's process: one request at a time."""

    def __init__(self, setup: Setup) -> None:
        self._node = Instance(setup, "decoder", 1)
        self._decoder = Decoder([self._node.rank], terms=self._node.terms)
        self._to = -1

    def meet(self, offer: bytes) -> None:
        self._to = self._decoder.connect(offer)

    def first_token(self, prompt: list[int], computed: bool) -> dict[str, Any]:
        """Asks for a prompt, and decodes one step after its first token. Times are monotonic
        nanoseconds."""
        tables = self._node.pools.open(prompt, len(prompt) + 1, most=0)
        pages = [
            table[: -(-len(prompt) // group.page_tokens)]
            for table, group in zip(tables.tables, self._node.pools.groups, strict=True)
        ]
        start = time.monotonic_ns()
        payload = msgspec.msgpack.encode(Asked(prompt, computed))
        pull = self._decoder.pull(
            self._to, tokens=len(prompt), tables=pages, payload=payload, timeout=_PATIENCE
        )
        pull.wait_ready(_PATIENCE)
        ready = time.monotonic_ns()
        engine = self._node.engine
        tail = engine.read_tail(self._node.tails[0])
        tokens = [] if computed else [sample(tail.logits, Sampling(), 0)]
        first = time.monotonic_ns()
        if tokens:
            row = DecodeRow(tokens[0], len(prompt), tables.tables)
            tokens.append(sample(engine.decode([row])[0], Sampling(), 1))
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
    say: Callable[[str], None],
    *,
    chunk_tokens: int = 1024,
    threads: int = 1,
    config: ModelConfig = MODEL,
) -> Sheet:
    """One row for each length.

    Args:
        lengths: tokens of the prompts.
        turns: of each length; prompts differ.
        say: is told what is being measured.
        chunk_tokens: of a pass.
        threads: of torch in each process.
        config: the model, of random weights.

    Raises:
        RuntimeError: both ways gave different tokens.
    """
    adopt_orphans()
    pages = -(-(max(lengths) + 1) // _PAGE_TOKENS) + 1
    spec = CacheSpec(page_tokens=_PAGE_TOKENS, pages=pages)
    setup = Setup(config, spec, "float32", chunk_tokens)
    env = {"OMP_NUM_THREADS": str(threads)}
    found: dict[int, list[Turn]] = {}
    children: list[Child] = []
    try:
        children.append(Child("benchmarks.kvcache.nodes:PrefillNode", setup, env=env))
        children.append(Child("benchmarks.kvcache.ttft:DecodeNode", setup, env=env))
        prefill, decode = children
        for child in children:
            child.end_call()
        decode.call("meet", prefill.call("offer"))
        drawn = random.Random(1)
        with keeping(lambda: _sheet(found, chunk_tokens, threads, config)):
            for length in lengths:
                for turn in range(turns + 1):
                    say(f"ttft, {length} tokens, turn {turn} of {turns}")
                    prompt = [drawn.randrange(config.vocab) for _ in range(length)]
                    one = _turn(prefill, decode, prompt, config.layers, turn % 2 == 0)
                    if turn:  # the first warms up
                        found.setdefault(length, []).append(one)
    finally:
        for child in children:
            child.kill()
    return _sheet(found, chunk_tokens, threads, config)


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
    while not prefill.call("state")["idle"]:
        if time.monotonic() > end:
            raise RuntimeError("the prefiller holds pages of a request that is over")
        time.sleep(1e-3)


def _sheet(
    found: dict[int, list[Turn]], chunk_tokens: int, threads: int, config: ModelConfig
) -> Sheet:
    rows = []
    for length, turns in found.items():
        whole, split, step, compute, exposed, asked, moved = (
            statistics.median(getattr(turn, name) for turn in turns)
            for name in Turn.__struct_fields__
        )
        added = statistics.median(turn.split - turn.whole for turn in turns)
        beside = statistics.median((turn.split - turn.whole) / turn.whole for turn in turns)
        met = added <= step + AIM * whole
        rows.append(
            (
                f"{length}",
                f"{whole * 1e3:.1f}",
                f"{split * 1e3:.1f}",
                f"{added * 1e3:+.2f} ({beside:+.1%})",
                f"{step * 1e3:.2f}",
                f"{compute * 1e3:.3f}",
                f"{moved * 1e3:.3f}",
                f"{asked * 1e3:.2f}",
                f"{exposed * 1e3:.2f}",
                f"{(asked + exposed) / split:.2%}",
                str(-(-length // chunk_tokens)),
                str(-(-min(length, chunk_tokens) // _PAGE_TOKENS)),
                verdict(met),
            )
        )
    page = _PAGE_TOKENS * 2 * config.kv_heads * config.head_dim * 4
    return Sheet(
        title="time to first token, ms",
        columns=(
            "tokens",
            "whole",
            "disaggregated",
            "difference",
            "one step",
            "compute / layer",
            "transfer / layer, alone",
            "asking",
            "not hidden",
            "of it",
            "steps",
            "pages",
            "aim",
        ),
        rows=tuple(rows),
        notes=(
            f"{config.layers} layers, hidden {config.hidden}, {page // 1024} KiB a page of "
            f"{_PAGE_TOKENS} tokens, chunks of {chunk_tokens}; torch has {threads} thread(s) in "
            "each process; tokens of both ways are equal",
            "asking: from the decoder's request to the prefiller's taking it; not hidden: from the "
            "end of computing until the decoder knows that all pages and the tail are there; of "
            "it: both, of the time disaggregated",
            f"aim: the difference is at most one decode step and {AIM:.0%}; the tail brings the "
            "logits, so no step is repeated before the first token",
        ),
        figures={
            "seconds": {str(length): msgspec.to_builtins(turns) for length, turns in found.items()}
        },
    )
