"""Ranks of an exchange as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll
from fabric_ray.moe.layer import MoeConfig

Done = TypeVar("Done")


def exchange_of(
    config: MoeConfig,
    engine: TransferEngine,
    *,
    rank: int,
    ranks: int,
    max_tokens: int,
    timeout: float = 30.0,
) -> AllToAll:
    return AllToAll(
        engine,
        rank=rank,
        ranks=ranks,
        experts=config.experts,
        topk=config.topk,
        hidden=config.hidden,
        max_tokens=max_tokens,
        dtype=config.torch_dtype,
        answer_dtype=config.torch_dtype,
        timeout=timeout,
    )


@contextmanager
def exchanges(config: MoeConfig, ranks: int, *, max_tokens: int = 32) -> Iterator[list[AllToAll]]:
    """One of each rank, joined over shared memory."""
    engines = [TransferEngine(name=f"rank-{r}", transport="shm") for r in range(ranks)]
    try:
        alls = [
            exchange_of(config, e, rank=r, ranks=ranks, max_tokens=max_tokens)
            for r, e in enumerate(engines)
        ]
        cards = [a.card() for a in alls]
        for a in alls:
            a.connect(cards)
        yield alls
    finally:
        for e in engines:
            e.close()


def together(works: list[Callable[[], Done]]) -> list[Done]:
    """What each returns, each in a thread of its own."""
    results: dict[int, Done] = {}
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(works))]


def tokens(seed: int, count: int, config: MoeConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.hidden, generator=generator).to(config.torch_dtype)
