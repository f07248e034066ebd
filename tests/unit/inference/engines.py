"""Engines on small models, and pages for one request that lie in no order."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import tiny
from fabric_ray.inference.protocols import DecodeRow, PrefillChunk, Tail
from fabric_ray.inference.spec import CacheSpec


@functools.cache
def weights(name: str, tp: int = 1) -> Model:
    return Model.random(tiny(name), tp=tp, dtype="float64")


def engine(name: str, *, tp: int = 1, **spec: object) -> TorchEngine:
    return TorchEngine(weights(name, tp), CacheSpec(**spec))  # type: ignore[arg-type]


def unpaged(model: Model, tokens: Sequence[int]) -> Tensor:
    """Logits of all positions, as trainers compute them."""
    out: Tensor = model.module(torch.tensor([tokens]))[0]
    return out


def text(length: int, *, seed: int = 0, vocab: int = 258) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(vocab) for _ in range(length)]


def shuffled(engine: TorchEngine, positions: int, *, seed: int = 0) -> tuple[list[int], ...]:
    """Page tables that are long enough, for each group."""
    drawn = random.Random(seed)
    return tuple(
        drawn.sample(range(group.pages), -(-positions // group.page_tokens))
        for group in engine.layout(0).groups
    )


def prefill(
    engine: TorchEngine,
    tokens: Sequence[int],
    tables: tuple[Sequence[int], ...],
    *,
    chunk: int = 1 << 20,
    start: int = 0,
) -> Tail:
    """A whole prompt in chunks."""
    for at in range(start, len(tokens), chunk):
        piece = tokens[at : at + chunk]
        last = at + chunk >= len(tokens)
        tail = engine.prefill(PrefillChunk(piece, at, tables, last=last))
        assert (tail is not None) == last
    assert tail is not None
    return tail


def step(
    engine: TorchEngine, token: int, position: int, tables: tuple[Sequence[int], ...]
) -> Tensor:
    return engine.decode([DecodeRow(token, position, tables)])[0]


def followed(
    engine: TorchEngine, tokens: Sequence[int], prompt: int, *, chunk: int = 1 << 20, seed: int = 0
) -> Tensor:
    """Logits from the prompt's last position on: its tail's, then those of decode steps."""
    tables = shuffled(engine, len(tokens), seed=seed)
    out = [prefill(engine, tokens[:prompt], tables, chunk=chunk).logits]
    out += [step(engine, tokens[p], p, tables) for p in range(prompt, len(tokens))]
    return torch.stack(out)
