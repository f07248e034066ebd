"""Ranks of an exchange as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from fabric_ray import TransferEngine
from fabric_ray.kernels.launch import Launcher
from fabric_ray.moe import AllToAll
from tests.moe_ranks import WAIT

Done = TypeVar("Done")


@contextmanager
def joined(
    launchers: Sequence[Launcher | None],
    *,
    transport: str = "shm",
    engines: list[TransferEngine] | None = None,
    direct: Sequence[bool] | None = None,
    **options: Any,
) -> Iterator[list[AllToAll]]:
    """Ranks that know one another, with what launches the kernels of each; their engines go into
    ``engines``."""
    with ExitStack() as stack:
        ranks = []
        for rank, launcher in enumerate(launchers):
            engine = stack.enter_context(TransferEngine(name=f"rank-{rank}", transport=transport))
            if engines is not None:
                engines.append(engine)
            if direct is not None:
                options["direct"] = direct[rank]
            numbers = {"rank": rank, "ranks": len(launchers)}
            ranks.append(AllToAll(engine, launcher=launcher, **numbers, **options))
        descriptors = [a.descriptor() for a in ranks]
        for a in ranks:
            a.connect(descriptors)
        yield ranks


def on_each(ranks: Sequence[AllToAll], work: Callable[[AllToAll], Done]) -> list[Done]:
    """What ``work`` returns on each rank, each in a thread."""
    return together([partial(work, a) for a in ranks])


def together(works: list[Callable[[], Done]]) -> list[Done]:
    """What each returns, each in a thread of its own."""
    results: dict[int, Done] = {}
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
        assert not t.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(works))]
