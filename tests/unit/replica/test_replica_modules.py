"""Engines whose layout only their own ``load_weights`` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Concat, Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.replica import ModuleReplica, module_side
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import SMALL
from tests.unit.replica.loading_engine import LoadingEngine
from tests.unit.replica.setups import Setup, closing, split


@pytest.fixture
def open_setup() -> Iterator[Callable[..., Setup]]:
    yield from closing([])


def replicas(config: Any, tp: int, ep: int, engines: int) -> tuple[Any, Callable[[], Any], list]:
    made: list[LoadingEngine] = []
    like = LoadingEngine(config, tp=tp, ep=ep)
    side = module_side(like.named_parameters(), size=tp, replicas=engines)

    def make() -> ModuleReplica:
        made.append(LoadingEngine(config, tp=tp, ep=ep))
        return ModuleReplica(made[-1], side, as_rank=made[-1].as_rank)

    return side, make, made


@pytest.mark.parametrize(
    ("model", "tp", "ep", "engines", "stages"),
    [
        ("llama", 2, 1, 2, [3]),
        ("llama-3.1", 4, 1, 1, [1, 2]),
        ("qwen2", 1, 1, 2, [1]),
        ("qwen3_moe", 4, 2, 1, [2]),
        ("qwen3_moe", 2, 2, 2, [1, 1]),
    ],
)
def test_rollouts_hold_what_the_engine_would_have_loaded(
    open_setup: Callable[..., Setup],
    model: str,
    tp: int,
    ep: int,
    engines: int,
    stages: list[int],
) -> None:
    config = SMALL[model]
    full = {name: tensor.clone() for name, tensor in noise(config).items()}
    side, make, _ = replicas(config, tp, ep, engines)
    biggest = max(tensor.nbytes for tensor in full.values())
    parts = zip(stages, split(full, len(stages)), strict=True)
    setup = open_setup(list(parts), side, replica=make, bucket=biggest)
    for _ in range(2):
        setup.sync.push()
        for target in setup.targets:
            expected = expected_containers(config, full, tp=tp, ep=ep, rank=target.rank % tp)
            assert_same(target.weights, {name: expected[name] for name in target.weights})
            assert target.weights.keys() == expected.keys()
        for tensor in full.values():
            tensor.mul_(0.5)


def test_what_an_engine_tensor_is_made_of_is_seen_by_watching_and_writes_nothing() -> None:
    config = SMALL["qwen3_moe"]
    side, make, made = replicas(config, 2, 2, 1)
    replica = make()
    before = {name: p.fill_(7).clone() for name, p in made[0].named_parameters()}
    from fabric_ray.weights.replica.gathering import Gathering

    whole = Gathering(noise(config), {}, 0).whole()
    needs = replica.needs(1, whole)
    layer = "model.layers.0."
    assert set(needs[layer + "self_attn.qkv_proj.weight"]) == {
        f"{layer}self_attn.{part}_proj.weight" for part in "qkv"
    }
    assert set(needs[layer + "mlp.experts.w2_weight"]) == {
        f"{layer}mlp.experts.{expert}.down_proj.weight" for expert in (3, 4, 5)
    }, "only the experts of that rank"
    assert set(needs) == {container.name for container in side.containers}
    assert_same(dict(made[0].named_parameters()), before)
    calls = made[0].calls
    replica.needs(1, whole)
    assert made[0].calls == calls


def test_a_tensor_that_would_be_filled_in_part_is_refused(
    open_setup: Callable[..., Setup],
) -> None:
    config = SMALL["llama"]
    full = noise(config)
    full.pop("model.layers.2.self_attn.v_proj.weight")
    side, make, _ = replicas(config, 2, 1, 1)
    setup = open_setup([(1, full)], side, replica=make)
    with pytest.raises(WeightSyncError, match=r"layers\.2\.self_attn\.qkv_proj.* fill only"):
        setup.sync.connect()


def test_a_module_without_a_tensor_of_the_side_is_refused() -> None:
    config = SMALL["llama"]
    side = module_side(LoadingEngine(config, tp=2, ep=1).named_parameters(), size=2)
    module = LoadingEngine(SMALL["qwen2"], tp=2, ep=1)
    with pytest.raises(InvalidArgument, match="`, which the module has not"):
        ModuleReplica(module, side, as_rank=module.as_rank)


@pytest.mark.parametrize(("size", "refused"), [(2, True), (1, False)])
def test_rs_1_a_module_that_cannot_load_as_each_rollout_is_refused(
    size: int, refused: bool
) -> None:
    module = LoadingEngine(SMALL["llama"], tp=size, ep=1)
    side = module_side(module.named_parameters(), size=size, replicas=2)
    words = "rollouts 0 and 1 hold other parts of the model, and as_rank is missing; give a context"
    with pytest.raises(InvalidArgument, match=words) if refused else nullcontext():
        ModuleReplica(module, side)


def test_a_module_of_other_sizes_is_refused_before_anything_is_sent(
    open_setup: Callable[..., Setup],
) -> None:
    config = SMALL["llama"]
    side, _, _ = replicas(config, 2, 1, 1)
    whole = LoadingEngine(config, tp=1, ep=1)
    setup = open_setup(
        [(1, noise(config))],
        side,
        replica=lambda: ModuleReplica(whole, side, as_rank=whole.as_rank),
    )
    with pytest.raises(WeightSyncError, match=r"of rollout 0 is float32 .* in the replica of tr"):
        setup.sync.connect()
    assert all(target.version is None for target in setup.targets)


def test_rs_1_ranks_with_other_slices_of_a_tensor_are_watched_by_themselves(
    open_setup: Callable[..., Setup],
) -> None:
    class Swapped(torch.nn.Module):
        """Rank 0 has row 0 as `a` and row 1 as `b`, rank 1 the other way round."""

        def __init__(self) -> None:
            super().__init__()
            self.rank = 0
            for name in "ab":
                self.register_buffer(name, torch.zeros(1, 3))

        @contextmanager
        def as_rank(self, rank: int) -> Iterator[None]:
            self.rank = rank
            yield

        def load_weights(self, weights: Any) -> None:
            for name, whole in weights:
                getattr(self, "ab"[(int(name) + self.rank) % 2]).copy_(whole)

    float32 = DType.of("float32")
    whole = Tensor("rows", (2, 3), float32)

    def container(name: str, rows: Sequence[int]) -> Container:
        parts = [
            Leaf(whole, Mesh.line([rank]), (Replicate(),), ((row, 1), (0, 3)))
            for rank, row in enumerate(rows)
        ]
        return Container(name, float32, Concat(0, tuple(parts)))

    side = Side.of(2, [container("a", (0, 1)), container("b", (1, 0))])

    def replica() -> ModuleReplica:
        module = Swapped()
        return ModuleReplica(module, side, as_rank=module.as_rank)

    rows = torch.arange(6.0).view(2, 1, 3)
    gathered = {"0": rows[0], "1": rows[1]}
    setup = open_setup([(1, gathered)], side, replica=replica, bucket=rows[0].nbytes)
    setup.sync.push()
    for rank, target in enumerate(setup.targets):
        assert_same(target.weights, {"a": rows[rank], "b": rows[1 - rank]})


def test_a_module_may_have_strides_scalars_and_one_storage_for_all(
    open_setup: Callable[..., Setup],
) -> None:
    class Transposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            room = torch.zeros(2, 6, 4)
            self.a = torch.nn.Parameter(room[0].t(), requires_grad=False)
            self.b = torch.nn.Parameter(room[1], requires_grad=False)
            self.register_buffer("scale", torch.zeros(()))

        def load_weights(self, weights: Any) -> None:
            for name, whole in weights:
                getattr(self, name).data.copy_(whole)

    tensors = Transposed().state_dict().items()
    side = module_side(tensors, size=2, replicas=2)
    full = {"a": torch.randn(4, 6), "b": torch.randn(6, 4), "scale": torch.tensor(3.0)}

    def replica() -> ModuleReplica:
        return ModuleReplica(Transposed(), side, as_rank=lambda _: nullcontext())

    setup = open_setup([(1, full)], side, replica=replica)
    setup.sync.push()
    for target in setup.targets:
        assert_same(target.weights, full)
        assert target.weights["a"].stride() == (1, 4)
    assert len(setup.sources[0]._memory._regions) == 2
