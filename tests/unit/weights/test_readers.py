"""RS-1: what a rollout reads is of one version, and a push that has to wait for it names it."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from tests.unit.weights.local_sync import (
    Fault,
    Module,
    expected,
    is_version,
)


@pytest.mark.parametrize("staged", [True, False])
def test_rs_1_no_version_is_put_into_use_while_the_one_before_is_read(open_sync, staged) -> None:
    sync = open_sync(staged=staged)
    target, seen = sync.targets[0], []

    def generate() -> None:
        with target.reading() as weights:
            held = weights["norm"]
            reads.set()
            for _ in range(40):
                seen.append((target.version, held.clone()))
                time.sleep(0.01)

    reads = threading.Event()
    with ThreadPoolExecutor() as pool:
        future = pool.submit(generate)
        reads.wait(10)
        sync.push()
        future.result()
    assert {version for version, _ in seen} == {1}
    assert all(torch.equal(norm, expected(0, 1)["norm"]) for _, norm in seen)
    with target.reading() as weights:
        assert is_version(weights, 0, 2)


@pytest.mark.parametrize("staged", [True, False])
def test_rs_1_a_reader_that_takes_too_long_is_named_and_all_keep_their_version(
    open_sync, staged
) -> None:
    sync = open_sync(staged=staged, timeout=0.5)
    target = sync.targets[1]
    with target.reading() as weights:
        with pytest.raises(WeightSyncError, match=r"did not stop reading within 0.5 s") as caught:
            sync.push()
        cause = caught.value.failed["rollout 1"]
        assert set(caught.value.failed) == {"rollout 1"}
        assert "test_rs_1_a_reader_that_takes" in cause
        assert "thread MainThread has been inside reading() for" in cause
        assert cause.endswith("; end the reading() block sooner, or raise WeightSync(timeout=)")
        assert is_version(weights, 1, 1)
        assert [t.version for t in sync.targets] == [1, 1]
        with target.reading() as again:  # the gate is open again
            assert is_version(again, 1, 1)
    assert sync.push().version == 2
    assert list(sync.broken(set(), before=2)) == []


@pytest.mark.parametrize("staged", [True, False])
def test_rs_1_a_tensor_bound_once_is_never_rewritten_and_the_push_names_it(
    open_sync, staged
) -> None:
    sync = open_sync(staged=staged, timeout=0.3)
    target = sync.targets[0]
    bound = target.weights["w"][1:].numpy()  # a view of a view
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"tensors of version 1, .*: `w`; .*into="):
            sync.push()
        assert target.version == 1
        assert torch.equal(torch.from_numpy(bound), expected(0, 1)["w"][1:])
    del bound
    assert sync.push().version == 2
    assert is_version(target.weights, 0, 2)


def test_a_holder_inside_reading_is_not_told_to_read_inside_it(open_sync) -> None:
    sync = open_sync(timeout=0.3)
    with sync.targets[0].reading() as weights:
        held = weights["w"]
        with pytest.raises(WeightSyncError) as caught:
            sync.push()
        cause = caught.value.failed["rollout 0"]
        assert "still referred to: `w`" in cause
        assert "read them inside" not in cause
        assert cause.endswith(
            "; end the reading() block sooner, drop its tensors before it ends, or raise "
            "WeightSync(timeout=)"
        )
        del held


def test_a_forward_pass_that_takes_too_long_is_named_with_what_to_do(open_sync) -> None:
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__, timeout=0.3)
    sync.train(1)
    sync.push()
    with ThreadPoolExecutor() as pool:
        passes = pool.submit(modules[0])
        assert modules[0].inside.wait(10)
        with pytest.raises(WeightSyncError) as caught:
            sync.push()
        modules[0].go_on.set()
        passes.result(10)
    cause = caught.value.failed["rollout 0"]
    assert re.search(r"a forward pass in thread \S+ has run for 0\.\d s; ", cause)
    assert cause.endswith("; push between forward passes, or raise WeightSync(timeout=)")
    with sync.targets[0].reading(), pytest.raises(WeightSyncError) as caught:
        sync.push()
    advice = "; end the reading() block sooner, or raise WeightSync(timeout=)"
    assert caught.value.failed["rollout 0"].endswith(advice)


def test_tensors_that_only_a_cycle_holds_delay_no_push(open_sync) -> None:
    sync = open_sync(timeout=2.0)
    cycle: list[Any] = [sync.targets[0].weights["w"]]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert sync.push().version == 2
    finally:
        gc.enable()


def test_rs_1_the_mapping_is_of_the_version_in_use_and_ends_with_its_block(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    bound = target.weights
    with target.reading() as weights:
        assert list(weights) == ["w", "norm"]
    with pytest.raises(WeightSyncError, match="after its `reading\\(\\)` had ended"):
        weights["w"]
    sync.push()
    assert is_version(bound, 0, 2)


def test_a_reader_that_fails_or_never_ends_its_block_is_no_reader(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]

    def generator() -> Iterator[None]:
        with target.reading():
            yield

    with pytest.raises(ZeroDivisionError), target.reading():
        _ = 1 / 0
    left = generator()
    next(left)
    del left
    assert sync.push().version == 2


def test_readers_that_begin_while_a_push_waits_read_the_next_version(open_sync) -> None:
    sync = open_sync()
    target, stop = sync.targets[0], threading.Event()
    wrong, reads = [], [0]

    def read_for_ever() -> None:
        while not stop.is_set():
            with target.reading() as weights, target.reading() as nested:
                version = target.version
                norm = weights["norm"].clone()
                time.sleep(0.002)
                reads[0] += 1
                if not is_version(nested, 0, version) or not torch.equal(norm, nested["norm"]):
                    wrong.append(version)

    threads = [threading.Thread(target=read_for_ever) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, 12):
            sync.train(version)
            assert sync.push().version == version  # never starved
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert reads[0] > 10
    assert wrong == []


def test_threads_of_a_reader_read_on_while_a_push_waits(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    with ThreadPoolExecutor() as pool, target.reading() as weights:
        push = pool.submit(sync.push)
        while not target._gate._is_closed:
            time.sleep(0.001)
        assert torch.equal(
            pool.submit(lambda: weights["norm"].clone()).result(2), expected(0, 1)["norm"]
        )
        assert not push.done()
    assert push.result(10).version == 2


def test_a_thread_that_holds_a_tensor_reads_the_next_while_a_push_waits_for_it(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    with ThreadPoolExecutor() as pool:
        items = iter(target.weights.items())
        name, tensor = next(items)
        push = pool.submit(sync.push)
        while not target._gate._is_closed:
            time.sleep(0.001)
        got = {name: tensor.clone()}
        for name, tensor in items:
            got[name] = tensor.clone()
        assert not push.done()
        del tensor
        assert push.result(10).version == 2
    assert is_version(got, 0, 1)


def test_a_reader_that_runs_a_stage_itself_is_refused(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    with target.reading():
        with pytest.raises(WeightSyncError, match="inside reading\\(\\), by `test_a_reader"):
            target.quiesce("commit", 5.0)
        target._prepared = 2
        with pytest.raises(WeightSyncError, match="inside reading\\(\\)"):
            target.commit(2)
    assert target.version == 1


def test_rs_1_a_commit_that_was_not_preceded_by_a_wait_refuses_readers(open_sync) -> None:
    target = open_sync().targets[0]
    held = target.weights["w"]
    target._prepared = 2
    with pytest.raises(WeightSyncError, match="still read: tensors of version 1"):
        target.commit(2)
    assert torch.equal(held, expected(0, 1)["w"])
    assert target.version == 1


def test_hooks_read_the_version_that_they_are_called_for(open_sync) -> None:
    sync = open_sync()
    target, seen = sync.targets[0], []

    def hook(version: int) -> None:
        with target.reading() as weights:
            seen.append((version, is_version(weights, 0, version)))

    target.on_commit(hook)
    sync.push()
    assert seen == [(2, True)]


def test_a_push_that_failed_elsewhere_lets_readers_in_again(open_sync) -> None:
    sync = open_sync(timeout=1.0)
    sync.fault = Fault("target_quiesce", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError, match="wait for its readers"):
        sync.push()
    began = time.monotonic()
    with sync.targets[0].reading() as weights:
        assert is_version(weights, 0, 1)
    assert time.monotonic() - began < 0.5


def test_readers_wait_for_no_controller_that_has_gone(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    assert target.quiesce("commit", 0.3) == ()
    began = time.monotonic()
    with target.reading() as weights:
        assert is_version(weights, 0, 1)
    assert 0.2 < time.monotonic() - began < 2.0


def test_a_closed_target_keeps_tensors_unchanged_and_admits_no_reader(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    assert target.quiesce("commit", 30.0) == ()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(target.reading().__enter__)
        time.sleep(0.05)
        target._gate.open()
        waits.result(5)
        with target.reading() as weights:
            held = weights["w"]
            target.close()
            assert torch.equal(held, expected(0, 1)["w"])
        sync.engines["rollout 0"].close()
        assert torch.equal(held, expected(0, 1)["w"])
        with pytest.raises(WeightSyncError, match="closed"), target.reading():
            pass


def test_a_layout_does_not_change_under_a_reader(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]
    share = target._routed()
    held = target.weights["w"]
    from msgspec.structs import replace

    with pytest.raises(WeightSyncError, match="still read"):
        target.accept(replace(share, containers=share.containers[:1]))
    assert torch.equal(held, expected(0, 1)["w"])


def test_rs_1_event_loops_read_by_async_with(open_sync) -> None:
    sync = open_sync()
    target = sync.targets[0]

    async def generate() -> set[tuple[int | None, bool]]:
        seen = set()
        async with target.reading() as weights:
            norm = weights["norm"]
            inside.set()
            for _ in range(30):
                await asyncio.sleep(0.01)
                seen.add((target.version, torch.equal(norm, expected(0, 1)["norm"])))
            with target.reading() as nested:
                assert is_version(nested, 0, 1)
        return seen

    async def main() -> None:
        with pytest.raises(InvalidArgument, match="use `async with"), target.reading():
            pass
        generates = asyncio.create_task(generate())
        await inside.wait()
        pushes = asyncio.create_task(asyncio.to_thread(sync.push))
        while not target._gate._is_closed:
            await asyncio.sleep(0.001)
        with pytest.raises(WeightSyncError, match="event loop can't wait"):
            target.weights["w"]
        async with target.reading() as weights:  # waits for the push, not the loop
            assert is_version(weights, 0, 2)
        assert await generates == {(1, True)}
        assert (await pushes).version == 2

    inside = asyncio.Event()
    asyncio.run(main())


def test_a_reader_that_is_refused_keeps_no_commit_waiting(open_sync) -> None:
    sync = open_sync(staged=False)
    target, check = sync.targets[0], sync.targets[0]._check_usable
    refused, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        try:
            check()
        except WeightSyncError:
            assert not target._gate._inside()
            refused.set()
            raise

    def poll() -> None:
        while not go_on.is_set():
            with suppress(WeightSyncError), target.reading():
                pass

    target._check_usable = slowly
    sync.before["source_push"] = lambda: refused.wait(20)
    with ThreadPoolExecutor() as pool:
        polls = pool.submit(poll)
        try:
            assert sync.push().version == 2
        finally:
            go_on.set()
        polls.result(20)
    assert refused.is_set()
