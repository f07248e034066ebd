"""A push that is cancelled ends before its caller goes on, on every rollout or on none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fabric_ray.weights import PushReport
from tests.unit.weights.local_sync import LocalSync


class Stop:
    """Stops a push in front of one phase."""

    def __init__(self, sync: LocalSync, phase: str) -> None:
        self._sync = sync
        self._inside, self._go_on = threading.Event(), threading.Event()
        self.asked: list[str] = []
        for name in ("source_push", "target_commit"):
            sync.before[name] = lambda name=name: self.asked.append(name)
        sync.before[phase] = self._wait

    def _wait(self) -> None:
        self._inside.set()
        assert self._go_on.wait(20)

    async def cancelled(self, push: asyncio.Task[Any], *, wanted: asyncio.Task[Any]) -> None:
        """Cancels a push while another, or the same, is in the phase; returns when it has ended."""
        assert await asyncio.to_thread(self._inside.wait, 20)
        for _ in range(2):
            push.cancel()
            await asyncio.sleep(0.05)
            assert not push.done(), "its caller would train while it goes on"
        self._go_on.set()
        await asyncio.wait([push, wanted])
        assert push.cancelled()
        self._sync.before.clear()


def pushing(sync: LocalSync) -> asyncio.Task[PushReport]:
    return asyncio.create_task(sync.push_async())


@pytest.mark.parametrize(
    ("phase", "staged"),
    [("target_begin", False), ("target_confirm", False), ("target_confirm", True)],
)
def test_rs_3_a_push_that_is_cancelled_before_its_version_is_decided_is_aborted(
    open_sync: Callable[..., LocalSync], phase: str, staged: bool
) -> None:
    sync = open_sync(staged=staged)
    stop = Stop(sync, phase)

    async def main() -> None:
        push = pushing(sync)
        await stop.cancelled(push, wanted=push)
        assert sync.version == 1
        assert stop.asked == ([] if phase == "target_begin" else ["source_push"])
        assert [target.version for target in sync.targets] == [1, 1]
        sync.train(3)
        assert (await sync.push_async(3)).version == 3

    asyncio.run(main())
    assert list(sync.broken(set(), before=3)) == []


def test_rs_3_a_push_that_is_cancelled_later_commits_on_every_rollout(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    stop = Stop(sync, "target_commit")

    async def main() -> None:
        push = pushing(sync)
        await stop.cancelled(push, wanted=push)

    asyncio.run(main())
    assert sync.version == 2
    assert list(sync.broken(set(), before=2)) == []


def test_a_push_that_is_cancelled_while_it_waits_for_another_leaves_that_alone(
    open_sync: Callable[..., LocalSync],
) -> None:
    sync = open_sync()
    stop = Stop(sync, "target_confirm")

    async def main() -> None:
        first = pushing(sync)
        assert await asyncio.to_thread(stop._inside.wait, 20)
        await stop.cancelled(pushing(sync), wanted=first)
        assert (await first).version == 2

    asyncio.run(main())
    assert stop.asked == ["source_push", "target_commit"], "one push was made"
    assert list(sync.broken(set(), before=2)) == []


def test_an_event_loop_that_ends_waits_for_its_push(open_sync: Callable[..., LocalSync]) -> None:
    sync = open_sync()
    stop = Stop(sync, "target_confirm")

    async def main() -> None:
        pushing(sync)
        assert await asyncio.to_thread(stop._inside.wait, 20)
        asyncio.get_running_loop().call_later(0.1, stop._go_on.set)

    asyncio.run(main())
    assert stop.asked == ["source_push"]
    assert sync.version == 1
