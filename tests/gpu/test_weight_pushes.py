"""Weight pushes from and into GPU memory, with kernels that have not run yet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Fp8, quantised_target
from tests.unit.weights.local_sync import InProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TRANSPORTS = ("cuda_ipc", "shm", "tcp")
SHAPES = {"0.weight": (128, 64), "1.weight": (96, 128), "1.bias": (96,)}
WEIGHTS = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
FAKE = bool(os.environ.get("FABRIC_RAY_FAKE_GPU"))
# Some 10 ms of a GPU.
_CYCLES = 20_000_000

Tensors = Mapping[str, torch.Tensor]


def on_gpu(shapes: Mapping[str, tuple[int, ...]] = SHAPES, **options: Any) -> dict[str, Any]:
    return {name: torch.zeros(shape, device="cuda", **options) for name, shape in shapes.items()}


def train(tensors: Tensors, version: int) -> None:
    """A step that has not run on the GPU when this returns."""
    torch.cuda._sleep(_CYCLES)
    for number, tensor in enumerate(tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 61 + number)
        tensor.mul_(0.25).add_(version)


def on_host() -> dict[str, torch.Tensor]:
    """A trainer that never waits for the GPU, so that the rollout alone does."""
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    for name, tensor in wanted.items():
        want = tensor.cpu().to(found[name].dtype)
        assert torch.equal(found[name].cpu(), want), name


def side(shapes: Mapping[str, tuple[int, ...]] = SHAPES, ranks: int = 1) -> Side:
    """Ranks that hold everything."""
    dtype, mesh = DType.of("float32"), Mesh.line(range(ranks))
    leaves = {
        name: Leaf(Tensor(name, s, dtype), mesh, (Replicate(),)) for name, s in shapes.items()
    }
    return Side.of(ranks, [Container(name, dtype, leaf) for name, leaf in leaves.items()])


class World:
    """One trainer and rollouts in one process, each with an engine of its own."""

    def __init__(self, transport: str = "auto") -> None:
        self._transport = transport
        self._open: list[Any] = []
        self.targets: list[WeightTarget] = []

    def engine(self, name: str) -> TransferEngine:
        engine = TransferEngine(name=name, transport=self._transport)
        self._open.append(engine)
        return engine

    def trainer(self, tensors: Any) -> WeightSource:
        self._open.append(WeightSource(tensors, rank=0, name="trainer", engine=self.engine("t")))
        return self._open[-1]

    def rollout(self, *args: Any, rank: int = 0, **options: Any) -> WeightTarget:
        name = f"rollout {len(self.targets)}"
        target = WeightTarget(*args, rank=rank, name=name, engine=self.engine(name), **options)
        self._open.append(target)
        self.targets.append(target)
        return target

    def sync(self, **options: Any) -> WeightSync:
        rollouts = [target.name for target in self.targets]
        options = {"timeout": 20.0, "digest": "delta" not in options, **options}
        return WeightSync(["trainer"], rollouts, calls=InProcess(), **options)

    def close(self) -> None:
        for part in reversed(self._open):
            part.close()


@contextmanager
def world(transport: str = "auto") -> Iterator[World]:
    torch.empty(1, device="cuda")
    made = World(transport)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rs_1_a_push_waits_for_the_optimizer(transport: str) -> None:
    model = on_gpu()
    with world(transport) as w:
        w.trainer(model)
        into = on_gpu()
        w.rollout(into=into, device="cuda")
        sync = w.sync()
        for version in range(1, 4):
            train(model, version)
            report = sync.push()
            assert_same(into, model)
            assert {link.transport for link in report.links} == {transport}


@pytest.mark.parametrize("device", [None, "cuda:0"], ids=["by the host", "on the GPU"])
def test_what_is_computed_for_a_push_is_computed_on_the_gpu_before_it_is_sent(
    device: str | None,
) -> None:
    """Casts from float32 to bfloat16, and a tensor that repeats its bytes."""
    model = on_gpu()
    model["1.bias"] = torch.zeros(1, device="cuda").expand(96)
    with world() as w:
        source = w.trainer(model)
        into = on_gpu(dtype=torch.bfloat16)
        w.rollout(into=into, device=device)
        sync = w.sync()
        for version in range(1, 4):
            train({name: model[name] for name in WEIGHTS}, version)
            model["1.bias"][:1].add_(version)
            sync.push()
            assert_same(into, model)
        assert source.temporary is not None
        assert source.temporary.cuda_device == 0


def test_fp8_blocks_are_made_on_the_gpu_as_on_the_host() -> None:
    formats = {"*": Fp8((16, 16))}
    model, found = on_gpu(WEIGHTS), []
    train(model, 1)
    for tensors in (model, {name: tensor.cpu() for name, tensor in model.items()}):
        with world() as w:
            w.trainer(tensors)
            target = w.rollout(quantised_target(side(WEIGHTS), formats))
            w.sync(formats=formats).push()
            with target.reading() as weights:
                found.append({name: weights[name].clone() for name in weights})
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(torch.uint8), found[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("staged", [True, False], ids=["two copies", "in place"])
def test_rs_1_kernels_of_a_reader_that_has_left_read_their_version(staged: bool) -> None:
    model = on_host()
    with world() as w:
        w.trainer(model)
        target = w.rollout(side(), device="cuda", staged=staged)
        sync = w.sync()
        wanted, read = [], []
        for version in range(1, 5):
            train(model, version)
            sync.push()
            wanted.append({name: tensor.clone() for name, tensor in model.items()})
            with target.reading() as weights:
                torch.cuda._sleep(_CYCLES)
                read.append({name: weights[name].clone() for name in weights})
        for found, want in zip(read, wanted, strict=True):
            assert_same(found, want)


def test_rs_1_a_tensor_on_the_gpu_that_is_referred_to_is_not_overwritten() -> None:
    model = on_host()
    with world() as w:
        w.trainer(model)
        target = w.rollout(side(), device="cuda")
        sync = w.sync(timeout=0.5)
        train(model, 1)
        sync.push()
        held = target.weights["1.bias"][3:]
        with pytest.raises(WeightSyncError, match=r"1\.bias"):
            sync.push()
        assert torch.equal(held.cpu(), model["1.bias"][3:].cpu())
        del held
        train(model, 2)
        sync.push()
        assert_same(target.weights, model)


def test_rs_1_a_commit_waits_for_kernels_of_the_module() -> None:
    """Versions arrive on the host; kernels of a forward pass that has returned still read."""
    model, stream = on_host(), torch.cuda.Stream()
    with world() as w:
        w.trainer(model)
        into = on_gpu()
        w.rollout(into=into)
        sync = w.sync()
        train(model, 1)
        sync.push()
        before = model["0.weight"].clone()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_CYCLES)
            read = into["0.weight"].clone()
        train(model, 2)
        sync.push()
        stream.synchronize()
        assert torch.equal(read.cpu(), before)
        assert_same(into, model)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_columns_arrive_as_rows_of_their_own(transport: str) -> None:
    """Many short runs of a trainer's memory, each of them a row of a rollout's."""
    dtype, shape = DType.of("float32"), (64, 96)
    columns = Leaf(Tensor("w", shape, dtype), Mesh.line(range(3)), (Shard(1),))
    model = on_gpu({"w": shape})
    with world(transport) as w:
        w.trainer(model)
        for rank in range(3):
            w.rollout(Side.of(3, [Container("w", dtype, columns)]), rank=rank, device="cuda")
        sync = w.sync()
        for version in (1, 2):
            train(model, version)
            sync.push()
            for target, part in zip(w.targets, model["w"].chunk(3, dim=1), strict=True):
                assert_same(target.weights, {"w": part})


def test_tied_tensors_of_a_module_on_the_gpu_stay_tied() -> None:
    shapes = {"embed": (128, 64), "head": (128, 64)}
    model = on_gpu(shapes)
    with world() as w:
        w.trainer(model)
        tied = torch.zeros(128, 64, device="cuda")
        into = {"embed": tied, "head": tied}
        w.rollout(side(shapes), into=into, device="cuda")
        sync = w.sync()
        train(model, 1)
        with pytest.raises(WeightSyncError, match="share memory"):
            sync.push()
        model["head"].copy_(model["embed"])
        sync.push()
        assert_same(into, model)


def test_changes_of_gpu_memory_are_sent() -> None:
    model = on_gpu({"w": (1024, 1024), "b": (64,)})
    with world() as w:
        w.trainer(model)
        into = on_gpu({"w": (1024, 1024), "b": (64,)})
        w.rollout(into=into)
        sync = w.sync(delta=True)
        train(model, 1)
        whole = sync.push().nbytes
        for row in (3, 700):
            torch.cuda._sleep(_CYCLES)
            model["w"][row].add_(1)
            report = sync.push()
            assert_same(into, model)
            assert report.nbytes < whole / 50


def test_changes_are_refused_where_versions_arrive_on_a_gpu() -> None:
    with world() as w:
        w.trainer(on_gpu())
        w.rollout(side(), device="cuda")
        with pytest.raises(WeightSyncError, match="host"):
            w.sync(delta=True).connect()


def test_a_replica_passes_its_version_on_from_gpu_to_gpu() -> None:
    model = on_gpu()
    with world() as w:
        w.trainer(model)
        for _ in range(3):
            w.rollout(side(), device="cuda")
        sync = w.sync(relay=True)
        for version in (1, 2):
            train(model, version)
            sync.push()
            for target in w.targets:
                assert_same(target.weights, model)


def test_tensors_on_the_host_and_on_the_gpu_go_together() -> None:
    model = {**on_gpu(), "0.weight": torch.zeros(128, 64)}
    with world() as w:
        w.trainer(model)
        into = on_gpu()
        w.rollout(into=into, device="cuda")
        sync = w.sync()
        train(model, 1)
        sync.push()
        assert_same(into, model)


def test_tensors_that_are_computed_on_two_devices_are_refused_by_name() -> None:
    model = {**on_gpu(), "0.weight": torch.zeros(128, 64)}
    with world() as w:
        w.trainer(model)
        w.rollout(into=on_gpu(dtype=torch.bfloat16))
        with pytest.raises(WeightSyncError, match=r"0\.weight"):
            w.sync().connect()


def test_a_device_that_is_no_gpu_of_cuda_is_refused() -> None:
    with world() as w, pytest.raises(InvalidArgument, match="xpu"):
        w.rollout(side(), device="xpu")


def test_pushes_come_from_any_thread() -> None:
    """As those of actors: the current stream of the thread is not the optimizer's."""
    model, stream = on_gpu(), torch.cuda.Stream()
    with world() as w:
        w.trainer(model)
        into = on_gpu()
        w.rollout(into=into, device="cuda")
        sync = w.sync()
        sync.connect()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            train(model, 1)
        pushing = threading.Thread(target=sync.push)
        pushing.start()
        pushing.join()
        stream.synchronize()
        assert_same(into, model)


def test_the_rate_of_a_push_beside_that_of_a_copy() -> None:
    shapes = {str(i): (256, 1 << 10 if FAKE else 1 << 18) for i in range(4)}
    model, into = on_gpu(shapes), on_gpu(shapes)
    with world() as w:
        w.trainer(model)
        w.rollout(side(shapes), device="cuda")
        sync = w.sync(digest=False)
        sync.push()
        nbytes = sum(tensor.nbytes for tensor in model.values())
        for _ in range(3):
            report = sync.push()
            start = time.perf_counter()
            for name, tensor in model.items():
                into[name].copy_(tensor)
            torch.cuda.synchronize()
            copied = time.perf_counter() - start
            rates = (
                f"push {nbytes / report.seconds / 1e9:.1f} GB/s, copy {nbytes / copied / 1e9:.1f}"
            )
            print("   ", rates)
        assert report.nbytes == nbytes
