"""RS-1: what a rollout reads is of one version, and a push that has to wait for it names it."""

from __future__ import annotations

import asyncio
import copy
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.weights import EngineHooks, WeightTarget
from fabric_ray.weights.replica.sides import whole_plan
from fabric_ray.weights.target import TARGETS
from tests.on_device import on_device, on_wait
from tests.unit.weights.local_sync import SHAPES, Fault, LocalSync, expected, side


class Module(torch.nn.Module):
    """A rollout's module, of rank 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = SHAPES["w"]
        self.w = torch.nn.Parameter(
            torch.zeros(rows // 2, columns, dtype=torch.int16), requires_grad=False
        )
        self.register_buffer("norm", torch.zeros(SHAPES["norm"], dtype=torch.int16))
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.norm.clone()
        self.inside.set()
        assert self.go_on.wait(20)
        return before, self.norm.clone()


def is_version(weights: Any, rank: int, version: int) -> bool:
    return all(torch.equal(weights[name], t) for name, t in expected(rank, version).items())


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


def test_rs_1_a_module_holds_the_version_in_use_whatever_is_bound_to_it(open_sync) -> None:
    modules = [Module(), Module()]
    bound = [(m.w, m.w.data, m.w[1:], m.norm) for m in modules]
    sync = open_sync(first=False, into=modules.__getitem__)
    seen = []
    for version in range(1, 6):
        sync.train(version)
        sync.push()
        for rank, (parameter, data, part, buffer) in enumerate(bound):
            want = expected(rank, version)
            assert torch.equal(parameter, want["w"])
            assert torch.equal(data, want["w"])
            assert torch.equal(part, want["w"][1:])
            assert torch.equal(buffer, want["norm"])
        seen.append((sync.targets[0].version, int(bound[0][3][0]) // 1000))
    assert seen == [(v, v) for v in range(1, 6)]
    assert len(sync.targets[0]._staging) == 1


def test_rs_1_a_push_that_fails_leaves_a_module_whole(open_sync) -> None:
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__)
    sync.train(1)
    sync.push()
    sync.train(2)
    sync.fault = Fault("target_confirm", "rollout 1", "is not asked")
    with pytest.raises(WeightSyncError):
        sync.push()
    for rank, target in enumerate(sync.targets):
        with target.reading() as weights:
            assert is_version(weights, rank, 1)
        assert is_version(modules[rank].state_dict(), rank, 1)
    sync.fault = None
    sync.push()
    assert is_version(modules[1].state_dict(), 1, 2)


def test_rs_1_a_module_that_was_filled_in_part_computes_nothing_before_the_next_push(
    open_sync,
) -> None:
    modules = [Module(), Module()]
    modules[0].go_on.set()
    sync = open_sync(first=False, into=modules.__getitem__)
    sync.train(1)
    sync.push()
    with pytest.raises(RuntimeError, match="size of tensor"):
        sync.targets[0]._into.copy({"w": expected(0, 2)["w"], "norm": torch.zeros(7)})
    with pytest.raises(WeightSyncError, match="copied into the module only in part"):
        modules[0]()
    with pytest.raises(WeightSyncError, match="copied into the module only in part"):
        _ = sync.targets[0].weights
    sync.train(2)
    sync.push()
    assert torch.equal(modules[0]()[0], expected(0, 2)["norm"])


def test_rs_1_a_parameter_that_was_replaced_after_confirming_leaves_the_module_whole(
    open_sync,
) -> None:
    class Replaces(EngineHooks):
        def pause_generation(self) -> None:
            modules[0].norm = modules[0].norm.float()

    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__, hooks=lambda _: Replaces())
    sync.train(1)
    with pytest.raises(WeightSyncError, match="`norm` of rank 0 is float32"):
        sync.push()
    assert not modules[0].w.any()


def test_rs_1_a_forward_pass_of_the_module_is_waited_for(open_sync) -> None:
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__)
    sync.train(1)
    sync.push()
    sync.train(2)
    with ThreadPoolExecutor() as pool:
        passes = pool.submit(modules[0])
        assert modules[0].inside.wait(10)
        push = pool.submit(sync.push)
        time.sleep(0.3)
        assert not push.done()
        modules[0].go_on.set()
        before, after = passes.result(10)
        assert torch.equal(before, expected(0, 1)["norm"])
        assert torch.equal(after, before)
        assert push.result(10).version == 2
    copy.deepcopy(modules[0].w)
    sync.targets[0].close()
    assert not modules[0]._forward_pre_hooks


def test_rs_1_kernels_that_read_the_module_end_between_the_pause_and_the_first_copy(
    open_sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(EngineHooks):
        def pause_generation(self) -> None:
            seen.append(("paused", version()))

        def continue_generation(self) -> None:
            seen.append(("goes on", version()))

    def version() -> tuple[int, int]:
        return int(tensors["w"].max()) // 1000, int(tensors["norm"].max()) // 1000

    seen: list[tuple[str, tuple[int, int]]] = []
    rows, columns = SHAPES["w"]
    tensors = {
        "w": torch.zeros(rows // 2, columns, dtype=torch.int16),
        "norm": torch.zeros(SHAPES["norm"], dtype=torch.int16),
    }
    into = {name: on_device(tensor) for name, tensor in tensors.items()}
    sync = open_sync(
        first=False,
        into=[into, Module()].__getitem__,
        hooks=lambda rank: Notes() if rank == 0 else EngineHooks(),
    )
    on_wait(monkeypatch, lambda: seen.append(("waited", version())))
    sync.train(1)
    sync.push()
    old, new = (0, 0), (1, 1)
    # The second time, so that the next pass reads what the last copy has written.
    assert seen == [("paused", old), ("waited", old), ("waited", new), ("goes on", new)]


class Plain(Module):
    """A module whose pass torch can compile."""

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return self.norm + 1


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_rs_1_a_compiled_forward_pass_is_waited_for(open_sync, how: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            inside.set()
            assert go_on.wait(20)
            return graph.forward(*args)

        return run

    def compiled(module: torch.nn.Module) -> Any:
        return torch.compile(module, backend=backend)

    modules = [Plain(), Plain()]
    first = compiled(modules[0]) if how == "before" else modules[0]
    sync = open_sync(first=False, into=[first, modules[1]].__getitem__)
    sync.train(1)
    sync.push()
    sync.train(2)
    if how == "in place":
        first.compile(backend=backend)
    run = compiled(first) if how == "after" else first
    with ThreadPoolExecutor() as pool:
        passes = pool.submit(run)
        assert inside.wait(60)
        push = pool.submit(sync.push)
        time.sleep(0.3)
        assert not push.done()
        go_on.set()
        assert torch.equal(passes.result(10), expected(0, 1)["norm"] + 1)
        assert push.result(10).version == 2
    assert torch.equal(run(), expected(0, 2)["norm"] + 1)
    torch.compiler.reset()


@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_pass_that_was_interrupted_delays_no_push(open_sync, inside: bool) -> None:
    """``ray.cancel`` and Ctrl-C raise what is no ``Exception``, for which torch runs no hook."""
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__, timeout=1.0)
    sync.train(1)
    sync.push()

    def interrupt() -> None:
        raise KeyboardInterrupt

    modules[0].inside.set = interrupt  # type: ignore[method-assign]
    reading = sync.targets[0].reading() if inside else nullcontext()
    with reading, pytest.raises(KeyboardInterrupt):
        modules[0]()
    sync.train(2)
    assert sync.push().version == 2
    del modules[0].inside.set
    modules[0].go_on.set()
    with sync.targets[0].reading():
        before, _ = modules[0]()
        assert torch.equal(before, expected(0, 2)["norm"])
        sync.train(3)
        with pytest.raises(WeightSyncError, match="did not stop reading"):
            sync.push()


def test_rs_1_a_module_that_a_push_would_fill_in_part_is_refused(open_sync) -> None:
    class More(Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

    def open_(into: Any) -> None:
        WeightTarget(side(), rank=0, name="refused", engine=sync.engines["rollout 0"], into=into)

    sync = open_sync(first=False)
    with pytest.raises(InvalidArgument, match="`scale` is in `into` and not in the side"):
        open_(More())
    other = Module()
    other.w = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int16), requires_grad=False)
    with pytest.raises(InvalidArgument, match=r"`w` of rank 0 is int16 \[2, 2\] in `into`"):
        open_(other)
    with pytest.raises(InvalidArgument, match="`norm` of rank 0 is in the side and not in `into`"):
        open_({"w": torch.zeros(4, 6, dtype=torch.int16)})
    with pytest.raises(InvalidArgument, match=r"int16 \[6\] without memory in `into`"):
        open_({"w": Module().w, "norm": torch.zeros(6, dtype=torch.int16, device="meta")})
    with pytest.raises(InvalidArgument, match="no weight target called"):
        TARGETS.get("refused")


def test_rs_1_a_parameter_that_was_replaced_fails_the_push_by_name_before_it_is_decided(
    open_sync,
) -> None:
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__)
    sync.train(1)
    sync.push()
    same = torch.nn.Parameter(torch.zeros_like(modules[0].w), requires_grad=False)
    modules[0].w = same
    sync.train(2)
    sync.push()
    assert torch.equal(same, expected(0, 2)["w"])
    modules[0].w = torch.nn.Parameter(same.float(), requires_grad=False)
    with pytest.raises(WeightSyncError, match="`w` of rank 0 is float32"):
        sync.push()
    assert [t.version for t in sync.targets] == [2, 2]


def test_rs_1_containers_that_share_memory_in_the_module_must_be_equal(open_sync) -> None:
    from fabric_ray.weights.destination import Destination

    shared = torch.zeros(4)
    tied = Destination({"a": shared, "b": shared}, None)  # type: ignore[arg-type]
    tied.check_ties({"a": torch.ones(4), "b": torch.ones(4)})
    with pytest.raises(WeightSyncError, match="`b` and `a` share memory"):
        tied.check_ties({"a": torch.ones(4), "b": torch.zeros(4)})


def test_rs_1_containers_that_share_a_part_of_their_memory_must_agree_there() -> None:
    from fabric_ray.weights.destination import Destination

    def into(**tensors: torch.Tensor) -> Destination:
        return Destination(tensors, None)  # type: ignore[arg-type]

    base = torch.zeros(6, 4)
    new = torch.randn(6, 4)
    rows = into(a=base[:4], b=base[2:])
    rows.check_ties({"a": new[:4], "b": new[2:]})
    with pytest.raises(WeightSyncError, match="`b` and `a` share memory"):
        rows.check_ties({"a": new[:4], "b": torch.randn(4, 4)})
    turned = into(embedding=base, head=base.t())
    turned.check_ties({"embedding": new, "head": new.t()})
    with pytest.raises(WeightSyncError, match="`head` and `embedding` share memory"):
        turned.check_ties({"embedding": new, "head": torch.randn(4, 6)})
    # Columns beside each other share no element.
    into(a=base[:, :2], b=base[:, 2:]).check_ties({"a": torch.ones(6, 2), "b": torch.zeros(6, 2)})
    assert not base.any()


def test_a_destination_that_repeats_its_memory_is_refused() -> None:
    from fabric_ray.weights.destination import Destination

    rows, columns = SHAPES["w"]
    one = torch.zeros(1, columns, dtype=torch.int16).expand(rows // 2, columns)
    repeated = Destination({"w": one, "norm": torch.zeros(6, dtype=torch.int16)}, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="`w` of rank 0 has the same memory"):
        repeated.check(whole_plan(side()).local_containers("target", 0), 0)


def test_modules_made_under_inference_mode_are_filled(open_sync) -> None:
    with torch.inference_mode():
        modules = [Module(), Module()]
    sync = open_sync(first=False, into=modules.__getitem__)
    sync.train(1)
    sync.push()
    with torch.inference_mode():
        assert is_version(modules[0].state_dict(), 0, 1)


def test_rs_1_names_are_those_of_the_plain_module(open_sync: Callable[..., LocalSync]) -> None:
    modules = [Module(), Module()]
    sync = open_sync(first=False, into=lambda rank: torch.compile(modules[rank]))
    sync.train(1)
    sync.push()
    assert is_version(modules[0].state_dict(), 0, 1)
