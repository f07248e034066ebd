"""RS-1: a module that pushes fill in place computes with one version, or not at all."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
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
from tests.unit.weights.local_sync import (
    SHAPES,
    Fault,
    LocalSync,
    Module,
    expected,
    is_version,
    side,
)


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
    more = More()
    with pytest.raises(InvalidArgument, match="`scale` is in `into` and not in the side"):
        open_(more)
    assert not more._forward_pre_hooks, "its passes wait for no push"
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
