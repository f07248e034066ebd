"""Threads of an engine that has nothing to do sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fabric_ray import TransferEngine
from tests.processes import within


def test_a_watcher_sleeps_until_its_word_may_change_without_a_call(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine()
    changes: list[int] = []
    watcher = engine.watch(lambda old, new: changes.append(new))
    watcher.store(1)
    within(5, "the first change", lambda: changes == [1])
    assert "at 0x" in repr(watcher), "showing the address hands it to no writer"
    assert _wakes("fabric-watcher", 0.5) <= 2, "it polls a word that only calls change"
    watcher.add()
    within(5, "a change by a call", lambda: changes == [1, 2])
    word = np.asarray(watcher)
    word[0] = 7
    within(5, "a plain store", lambda: changes[-1] == 7)
    assert _wakes("fabric-watcher", 0.5) > 20
    del word, watcher
    assert _wakes("fabric-watcher", 0.5) <= 2, "a word that is gone is polled"


def _wakes(name: str, seconds: float) -> int:
    """How often the threads of this process with this name go to sleep within ``seconds``."""

    def slept() -> int:
        n = 0
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().strip() == name:
                status = (task / "status").read_text()
                n += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return n

    before = slept()
    time.sleep(seconds)
    return slept() - before
