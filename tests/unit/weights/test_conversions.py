"""Pushes that change dtypes: what arrives is what quantising whole tensors gives, whatever the
watermark, and what cannot be converted reaches nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Cast, Format, Fp8, Int8, quantise, quantised_target
from tests.unit.weights.local_sync import InProcess

TRAINERS, ROLLOUTS = 3, 2
BF16 = DType.of("bfloat16")
# 22 rows are 8, 8 and 6 on the trainers: blocks of 3 rows lie on two of them.
SHAPES = {f"layers.{i}.weight": (12 + 10 * (i % 2), 9) for i in range(5)} | {"norm": (6,)}
FORMATS: list[Format] = [
    Fp8((3, 3)),
    Fp8((5, 4), "ue8m0_byte"),
    Fp8("channel"),
    Fp8("tensor"),
    Int8(),
    Cast("float32"),
]


def side(ranks: int) -> Side:
    mesh = Mesh.line(range(ranks))

    def container(name: str, placement: Any) -> Container:
        return Container(name, BF16, Leaf(Tensor(name, SHAPES[name], BF16), mesh, (placement,)))

    sharded = [container(n, Shard(0) if n != "norm" else Replicate()) for n in SHAPES]
    return Side.of(ranks, sharded)


def whole(ranks: int) -> Side:
    """Rollouts that hold everything."""
    mesh = Mesh.line(range(ranks))
    return Side.of(
        ranks,
        [
            Container(name, BF16, Leaf(Tensor(name, shape, BF16), mesh, (Replicate(),)))
            for name, shape in SHAPES.items()
        ],
    )


def full(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator).to(torch.bfloat16)


def shard(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    return tensor if name == "norm" else tensor.chunk(TRAINERS)[rank]


class Setup:
    def __init__(self, fmt: Format, watermark: int, target: Side, digest: bool) -> None:
        self.engines: list[TransferEngine] = []
        self.tensors = [
            {n: shard(full(n, 0), n, r).clone() for n in SHAPES} for r in range(TRAINERS)
        ]
        formats = {"layers.*.weight": fmt}
        self.sources = [
            WeightSource(
                tensors,
                rank=rank,
                side=side(TRAINERS),
                name=f"trainer {rank}",
                engine=self._engine(f"trainer {rank}"),
                watermark=watermark,
            )
            for rank, tensors in enumerate(self.tensors)
        ]
        self.targets = [
            WeightTarget(
                quantised_target(target, formats),
                rank=rank,
                name=f"rollout {rank}",
                engine=self._engine(f"rollout {rank}"),
            )
            for rank in range(ROLLOUTS)
        ]
        self.sync = WeightSync(
            [f"trainer {i}" for i in range(TRAINERS)],
            [f"rollout {i}" for i in range(ROLLOUTS)],
            formats=formats,
            digest=digest,
            timeout=5.0,
            calls=InProcess(),
        )

    def _engine(self, name: str) -> TransferEngine:
        self.engines.append(TransferEngine(name=name, transport="shm"))
        return self.engines[-1]

    def train(self, version: int) -> None:
        for rank, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                tensor.copy_(shard(full(name, version), name, rank))

    def close(self) -> None:
        for part in (*self.sources, *self.targets):
            part.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def set_up() -> Iterator[Callable[..., Setup]]:
    made = []

    def make(fmt: Format, *, watermark: int = 1 << 20, digest: bool = True) -> Setup:
        made.append(Setup(fmt, watermark, whole(ROLLOUTS), digest))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


def wrong(setup: Setup, fmt: Format, version: int) -> list[str]:
    """What the rollouts hold that isn't made of whole tensors."""
    out = []
    for target in setup.targets:
        expected: dict[str, torch.Tensor] = {"norm": full("norm", version)}
        for name in SHAPES:
            if name != "norm":
                values, scales = quantise(full(name, version), fmt)
                expected[name] = values
                found = [n for n in target.weights if n.startswith(name + "_")]
                if scales is not None:
                    expected[found[0]] = scales.reshape(target.weights[found[0]].shape)
        assert set(expected) == set(target.weights)
        out += [
            f"{name} at {target.rank}"
            for name, tensor in expected.items()
            if not torch.equal(
                target.weights[name].contiguous().view(torch.uint8),
                tensor.contiguous().view(torch.uint8),
            )
        ]
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("watermark", [1024, 1 << 20])
def test_what_arrives_is_what_quantising_whole_tensors_gives(
    set_up: Callable[..., Setup], fmt: Format, watermark: int
) -> None:
    setup = set_up(fmt, watermark=watermark)
    for version in (1, 2, 3):
        setup.train(version)
        setup.sync.push()
        assert wrong(setup, fmt, version) == []


def test_steps_are_made_ready_under_the_watermark(set_up: Callable[..., Setup]) -> None:
    setup = set_up(Fp8("channel"), watermark=1024)
    setup.sync.push()
    for source in setup.sources:
        assert len(source._steps) > 2
        assert source._ring is not None
        assert source._ring.nbytes <= 1024


def test_a_tensor_above_the_watermark_is_refused_by_name_before_anything_is_sent(
    set_up: Callable[..., Setup],
) -> None:
    setup = set_up(Cast("float32"), watermark=256)
    with pytest.raises(WeightSyncError, match=r"layers\.\d\.weight` takes .* raise the watermark"):
        setup.sync.connect()


def test_what_cannot_be_converted_is_named_reaches_nobody_and_the_next_version_arrives(
    set_up: Callable[..., Setup],
) -> None:
    fmt = Fp8((3, 3))
    setup = set_up(fmt)
    setup.train(1)
    setup.sync.push()
    setup.train(2)
    setup.tensors[1]["layers.3.weight"][0, 0] = torch.nan
    with pytest.raises(WeightSyncError, match=r"layers\.3\.weight"):
        setup.sync.push()
    assert [target.version for target in setup.targets] == [1, 1]
    assert wrong(setup, fmt, 1) == []
    setup.train(3)
    setup.sync.push()
    assert wrong(setup, fmt, 3) == []


def test_tensors_that_contradict_the_side_are_refused(set_up: Callable[..., Setup]) -> None:
    setup = set_up(Fp8("tensor"))
    setup.tensors[2]["layers.1.weight"] = torch.zeros(6, 8, dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.weight` of rank 2 is bfloat16 \[6, 8\]"):
        setup.sync.connect()


def test_a_watermark_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="watermark of 0 bytes"):
        WeightSource({"w": torch.zeros(1)}, rank=0, watermark=0)
