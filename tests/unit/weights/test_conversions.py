"""Pushes that change dtypes: what arrives is what quantising whole tensors gives, whatever the
watermark, and an inconvertible tensor reaches no rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Side
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights import source as weight_source
from fabric_ray.weights.quant import Cast, Format, Fp8, Int8, quantised_target
from tests.unit.weights.local_sync import InProcess
from tests.unit.weights.quantised_model import (
    CONVERTED,
    ROLLOUTS,
    SHAPES,
    TRAINERS,
    full,
    shard,
    side,
    whole,
)
from tests.unit.weights.quantised_model import wrong as wrong_at

FORMATS: list[Format] = [
    Fp8((3, 3)),
    Fp8((5, 4), "ue8m0_byte"),
    Fp8("channel"),
    Fp8("tensor"),
    Int8(),
    Cast("float32"),
]


class Setup:
    def __init__(self, fmt: Format, watermark: int | None, target: Side, digest: bool) -> None:
        self.engines: list[TransferEngine] = []
        self.tensors = [
            {n: shard(full(n, 0), n, r).clone() for n in SHAPES} for r in range(TRAINERS)
        ]
        formats = {CONVERTED: fmt}
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

    def make(fmt: Format, *, watermark: int | None = 1 << 20, digest: bool = True) -> Setup:
        made.append(Setup(fmt, watermark, whole(ROLLOUTS), digest))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


def wrong(setup: Setup, fmt: Format, version: int) -> list[str]:
    """What the rollouts hold that isn't made of whole tensors."""
    return [name for target in setup.targets for name in wrong_at(target, fmt, version)]


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
        assert source.temporary is not None
        assert source.temporary.nbytes <= 1024


def test_a_tensor_above_the_watermark_is_refused_by_name_before_anything_is_sent(
    set_up: Callable[..., Setup],
) -> None:
    setup = set_up(Cast("float32"), watermark=256)
    with pytest.raises(WeightSyncError, match=r"layers\.\d\.weight` needs .* raise the watermark"):
        setup.sync.connect()


def test_the_default_watermark_has_room_for_the_largest_tensor(
    set_up: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_source, "_WATERMARK", 16)
    fmt = Cast("float32")
    setup = set_up(fmt, watermark=None)
    setup.train(1)
    setup.sync.push()
    assert wrong(setup, fmt, 1) == []


def test_an_inconvertible_tensor_is_named_is_not_committed_and_the_next_version_arrives(
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
    with pytest.raises(
        WeightSyncError, match=r"layers\.1\.weight` of rank 2 differs .* got bfloat16 \[6, 8\]"
    ):
        setup.sync.connect()


def test_a_watermark_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="watermark must be >= 1 byte, got 0"):
        WeightSource({"w": torch.zeros(1)}, rank=0, watermark=0)
