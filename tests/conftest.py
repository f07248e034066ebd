"""Shared fixtures: engines that are closed for sure."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from fabric_ray import TransferEngine
from tests.examples import examples

# A machine that is busy elsewhere for a moment breaks no promise.
settings.register_profile("patient", deadline=None, max_examples=examples(100))
settings.load_profile("patient")
# Two cores that are busy need longer than Ray allows by default, and starve actors at nice 15.
os.environ.setdefault("RAY_agent_register_timeout_ms", "180000")
os.environ.setdefault("RAY_worker_niceness", "0")
# A background job's processes ignore Ctrl-C, and those under nohup SIGHUP; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" in config.getoption("markexpr", ""):
        return
    left = [item for item in items if item.get_closest_marker("long")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Keeps the collector from all that was imported: a sixth of the tests' CPU time went there."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks when the process ends find none."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was left out and why, for most of it is left out for want of a tool.

    ``FABRIC_RAY_LEFT_OUT`` names a file that gets the same, one line each, after what it holds.
    """
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    if not reasons:
        return
    counted = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    lines = [f"{n} left out: {reason}" for reason, n in sorted(counted.items())]
    terminalreporter.section("left out")
    for line in lines:
        terminalreporter.line(line)
    if kept := os.environ.get("FABRIC_RAY_LEFT_OUT"):
        with open(kept, "a") as file:
            file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def open_(name: str = "e", **overrides: Any) -> TransferEngine:
        engine = TransferEngine(name=name, **overrides)
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(
    request: pytest.FixtureRequest, open_engine: Callable[..., TransferEngine]
) -> tuple[TransferEngine, TransferEngine]:
    """Two engines that are joined by one transport."""
    return open_engine("a", transport=request.param), open_engine("b", transport=request.param)
