"""Pushes at awkward moments: tensors that changed, controllers that overlap, trainers that fail."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import (
    Container,
    DType,
    ExtraTensors,
    Leaf,
    Mesh,
    Replicate,
    Shard,
    Side,
    Tensor,
)
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.conversion import Conversion
from fabric_ray.weights.quant import Cast, Formats, Fp8, quantise, quantised_target
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource
from tests.processes import within
from tests.unit.weights.local_sync import InProcess

BF16 = DType.of("bfloat16")
Shapes = dict[str, tuple[int, ...]]


def side_of(shapes: Shapes, ranks: int, placement: Any, *, first: int = 0) -> Side:
    mesh = Mesh.line(range(first, first + ranks))
    return Side.of(
        ranks,
        [
            Container(name, BF16, Leaf(Tensor(name, shape, BF16), mesh, (placement,)))
            for name, shape in shapes.items()
        ],
    )


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


class Few:
    """Some trainers and a rollout."""

    def __init__(
        self,
        tensors: list[dict[str, torch.Tensor]],
        target: Side,
        formats: Formats | None = None,
        *,
        side: Side | None = None,
        watermark: int = 1 << 20,
        source: Callable[..., Any] | None = None,
    ) -> None:
        self.tensors, self.formats = tensors, formats
        self.trainers = [f"trainer {i}" for i in range(len(tensors))]
        self.engines = {
            who: TransferEngine(name=who, transport="shm") for who in (*self.trainers, "rollout 0")
        }
        source = source or partial(WeightSource, side=side, watermark=watermark)
        self.sources = [
            source(tensors[rank], rank=rank, name=who, engine=self.engines[who])
            for rank, who in enumerate(self.trainers)
        ]
        self.target = WeightTarget(
            quantised_target(target, formats or {}),
            rank=0,
            name="rollout 0",
            engine=self.engines["rollout 0"],
        )
        self.calls = InProcess()

    def controller(self, **options: Any) -> WeightSync:
        return WeightSync(
            self.trainers,
            ["rollout 0"],
            formats=self.formats,
            calls=self.calls,
            **{"timeout": 5.0, **options},
        )

    def close(self) -> None:
        for part in (*self.sources, self.target):
            part.close()
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def few() -> Iterator[Callable[..., Few]]:
    made = []

    def make(*args: Any, **options: Any) -> Few:
        made.append(Few(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_replicas_with_other_strides_convert_what_they_hold(few: Callable[..., Few]) -> None:
    full = noise(512, 1024)
    for fmt in (Cast("float16"), Fp8((128, 128))):
        tensors = [{"w": full.clone()}, {"w": full.t().contiguous().t()}]
        setup = few(tensors, side_of({"w": (512, 1024)}, 1, Replicate()), {"w": fmt})
        setup.controller().push()
        values, _ = quantise(full, fmt)
        assert torch.equal(setup.target.weights["w"].view(torch.uint8), values.view(torch.uint8))
        setup.close()


def test_other_strides_are_refused_and_a_connect_that_failed_leaves_no_route(
    few: Callable[..., Few],
) -> None:
    full = noise(64, 32)
    setup = few([{"w": full.clone()}], side_of({"w": (64, 32)}, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    setup.tensors[0]["w"] = full.t().contiguous().t()
    with pytest.raises(
        WeightSyncError, match=r"got .* strides \[1, 64\], expected .* strides \[32, 1\]"
    ):
        sync.push()
    setup.calls.fault = ("target_meta", "rollout 0", "is not asked")  # type: ignore[assignment]
    with pytest.raises(WeightSyncError, match="rollout 0 did not gather metadata"):
        sync.connect()
    setup.calls.fault = None
    sync.push()
    assert torch.equal(setup.target.weights["w"], full)


@pytest.mark.parametrize("formats", [None, {"w": Cast("float16")}])
def test_a_controller_that_was_fenced_off_does_not_come_back_by_itself(
    few: Callable[..., Few], formats: Formats | None
) -> None:
    setup = few([{"w": noise(64, 32)}], side_of({"w": (64, 32)}, 1, Replicate()), formats)
    first = setup.controller()
    first.push()
    second = setup.controller()
    second.push()
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="another WeightSync has connected"):
            first.push()
    second.push()


def test_a_failure_before_the_exchange_is_named_first_and_delays_no_rank(
    few: Callable[..., Few],
) -> None:
    full, shapes = noise(22, 9), {"w": (22, 9)}
    shards = [{"w": shard.clone()} for shard in full.chunk(3)]
    setup = few(
        shards,
        side_of(shapes, 1, Replicate()),
        {"w": Fp8((3, 3))},
        side=side_of(shapes, 3, Shard(0)),
    )
    sync = setup.controller(timeout=30.0)
    sync.push()
    kept = shards[1]["w"]
    shards[1]["w"] = torch.zeros(8, 9)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"trainer 1 and trainer [02] .*float32") as caught:
        sync.push()
    assert time.monotonic() - start < 20, "the others waited until their time was up"
    assert next(iter(caught.value.failed)) == "trainer 1"
    shards[1]["w"] = kept
    sync.push()


def test_formats_that_fit_nothing_are_refused(few: Callable[..., Few]) -> None:
    plain = side_of({"w": (64, 32)}, 1, Replicate())
    setup = few([{"w": noise(64, 32)}], plain, {"w.wieght": Fp8()})
    with pytest.raises(InvalidArgument, match=r"no tensor .* matches a pattern of \['w.wieght'\]"):
        setup.controller().connect()


def test_values_without_their_scales_are_refused(few: Callable[..., Few]) -> None:
    formats = {"w": Fp8((32, 32))}
    whole = quantised_target(side_of({"w": (64, 32)}, 1, Replicate()), formats)
    bare = Side.of(1, [c for c in whole.containers if not c.name.endswith("_inv")])
    setup = few([{"w": noise(64, 32)}], bare)
    setup.formats = formats
    with pytest.raises(InvalidArgument, match="`w` but not its scales `w_scale_inv`"):
        setup.controller(leave=("*",)).connect()


def test_what_stays_behind_is_named_before_and_listed_after(few: Callable[..., Few]) -> None:
    tensors = {"w": noise(4, 4), "draft.a": noise(2), "draft.b": noise(2)}
    setup = few([tensors], side_of({"w": (4, 4)}, 1, Replicate()))
    with pytest.raises(ExtraTensors, match=r"needs `draft.a`, `draft.b` of the source.*\(MTP\)"):
        setup.controller().connect()
    with pytest.raises(InvalidArgument, match="leave='w' names `w`, which the target needs"):
        setup.controller(leave=("draft.*", "w")).connect()
    sync = setup.controller(leave=("draft.*",))
    assert sync.connect().left == ("draft.a", "draft.b")
    report = sync.push()
    assert report.left == ("draft.a", "draft.b")
    assert "  not pushed: draft.a and 1 more" in str(report).splitlines()


def test_a_parameter_that_is_gone_is_not_pushed(few: Callable[..., Few]) -> None:
    shapes = {"v": (4, 4), "w": (4, 4)}
    tensors = [{name: noise(4, 4) for name in shapes}]
    setup = few(tensors, side_of(shapes, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    del tensors[0]["w"]
    with pytest.raises(WeightSyncError, match="`w` has been removed"):
        sync.push()


@pytest.mark.parametrize("how", ["shards", "side", "converted", "changes", "replica"])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_trainer_that_holds_nothing_takes_part(
    few: Callable[..., Few], how: str, empty: int
) -> None:
    tensors = {"w": noise(8, 4), "v": noise(6)}
    held: list[dict[str, torch.Tensor]] = [tensors, tensors]
    held[empty] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    target, options = side_of(shapes, 1, Replicate()), dict[str, Any]()
    if how == "converted":
        options["formats"] = {"w": Cast("float32")}
    if how == "side":
        holder = side_of(shapes, 1, Replicate(), first=1 - empty)
        options["side"] = Side.of(2, holder.containers)
    if how == "replica":
        options["source"] = lambda tensors, *, rank, **kw: ReplicaSource(
            tensors, LayoutReplica(target), rank=rank, stage=rank, **kw
        )
    setup = few(held, target, **options)
    sync = setup.controller(digest=True, delta=how == "changes")
    for _ in range(2):
        tensors["v"] += 1
        sync.push()
        with setup.target.reading() as weights:
            assert all(torch.equal(weights[n], t.to(weights[n].dtype)) for n, t in tensors.items())


@pytest.mark.parametrize(
    "given", [{}, {"w": torch.zeros(0, 4, dtype=torch.bfloat16)}], ids=["left out", "given"]
)
def test_a_share_of_no_rows_may_be_given_or_left_out(few: Callable[..., Few], given: Any) -> None:
    whole, shapes = noise(2, 4), {"w": (2, 4)}
    held = [{"w": whole[:1]}, {"w": whole[1:]}, given]
    setup = few(held, side_of(shapes, 1, Replicate()), side=side_of(shapes, 3, Shard(0)))
    setup.controller(digest=True).push()
    with setup.target.reading() as weights:
        assert torch.equal(weights["w"], whole)


@pytest.mark.parametrize("change", ["longer", "longer in place", "at another trainer"])
def test_mr_1_a_connect_registers_anew_what_lies_elsewhere(
    few: Callable[..., Few], change: str
) -> None:
    memory = noise(8, 8)
    tensors = [{"v": noise(4), "w": memory.flatten()[:16].view(4, 4)}, {"v": noise(4)}]
    tensors[1]["v"] = tensors[0]["v"].clone()
    setup = few(tensors, side_of({"v": (4,), "w": (4, 4)}, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    if change == "at another trainer":
        tensors[1]["w"] = tensors[0].pop("w").neg().resolve_neg()
        moved = tensors[1]["w"]
    else:
        moved = tensors[0]["w"] = memory[:4, :4] if "place" in change else noise(4, 9)[:, :4]
    sync.connect()
    sync.push()
    with setup.target.reading() as weights:
        assert torch.equal(weights["w"], moved)


def test_memory_of_released_parameters_goes_with_them(few: Callable[..., Few]) -> None:
    array = np.zeros((64, 32), np.uint16)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.from_numpy(array).view(torch.bfloat16))
    memory = weakref.ref(array)
    del array
    setup = few([module], side_of({"w": (64, 32)}, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    module.w.data = moved = noise(64, 32)  # as a module that goes to another device
    assert memory() is not None, "a registration keeps it"
    setup.sources[0].release()
    within(5.0, "the release of the memory", lambda: memory() is None)
    sync.push()
    with setup.target.reading() as weights:
        assert torch.equal(weights["w"], moved)


def test_routes_to_keys_of_the_past_are_forgotten(few: Callable[..., Few]) -> None:
    setup = few([{"w": noise(4, 4)}], side_of({"w": (4, 4)}, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    for _ in range(8):
        setup.calls.fault = ("target_confirm", "rollout 0", "is not asked")  # type: ignore[assignment]
        with pytest.raises(WeightSyncError):
            sync.push()
        setup.calls.fault = None
    sync.push()
    assert len(setup.sources[0]._routes._known[0]) <= 4


def test_a_push_that_is_overtaken_makes_nothing_ready_for_the_next(
    few: Callable[..., Few], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {f"w{i}": (64, 64) for i in range(6)}
    tensors = [{name: noise(64, 64) for name in shapes}]
    setup = few(
        tensors, side_of(shapes, 1, Replicate()), {"w*": Cast("float16")}, watermark=4 * 64 * 64
    )
    sync = setup.controller()
    sync.push()
    held, go_on = threading.Event(), threading.Event()
    prepare = Conversion.prepare

    def slow(self: Conversion, unit: Any, *args: Any) -> None:
        if unit.name == "w2" and not held.is_set():
            held.set()
            assert go_on.wait(20)
        prepare(self, unit, *args)

    monkeypatch.setattr(Conversion, "prepare", slow)
    outcome: list[BaseException] = []

    def push() -> None:
        try:
            sync.push()
        except BaseException as error:
            outcome.append(error)

    late = threading.Thread(target=push)
    late.start()
    assert held.wait(20)
    for tensor in tensors[0].values():
        tensor.copy_(noise(64, 64))
    second = setup.controller()
    overtaking = threading.Thread(target=second.push)
    claims = setup.sources[0]._calls_lock
    claim = claims.latest
    overtaking.start()
    within(30, "the second controller's claim", lambda: claims.latest is not claim)
    go_on.set()
    late.join(30)
    overtaking.join(30)
    assert not late.is_alive()
    assert not overtaking.is_alive()
    assert isinstance(outcome[0], WeightSyncError)
    assert second.version == 2
    for name, tensor in tensors[0].items():
        assert torch.equal(setup.target.weights[name], tensor.half())


def test_a_hook_that_fails_is_told_and_the_version_is_in_use(few: Callable[..., Few]) -> None:
    setup = few([{"w": noise(4, 4)}], side_of({"w": (4, 4)}, 1, Replicate()))
    setup.target.on_commit(lambda version: {}["missing"])
    sync = setup.controller()
    with pytest.raises(WeightSyncError, match="in use everywhere, but a hook failed at rollout 0"):
        sync.push()
    assert sync.version == setup.target.version == 1
