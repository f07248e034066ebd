"""RS-3 holds for pushes from replicas, wherever in a gather something goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import ExtraTensors
from fabric_ray.weights.families import target_side
from fabric_ray.weights.quant import Fp8, linear_formats, quantised_target
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.replica import LayoutReplica
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import SMALL
from tests.unit.replica.setups import Setup, closing, split
from tests.unit.weights.local_sync import Fault

CONFIG = SMALL["llama"]
FULL = noise(CONFIG)
SIDE = target_side(CONFIG, tp=2, ranks=range(4))
MIDDLE, LAST = "model.layers.1.mlp.up_proj.weight", list(FULL)[-1]


@pytest.fixture
def open_setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setup]]:
    # All actors are in this process: no delay between hosts has to be allowed for.
    monkeypatch.setattr("fabric_ray.weights.session._GATE_S", 1.0)
    yield from closing([])


class Trainer:
    """Gathers a model of which every version differs, and does something odd at one tensor."""

    def __init__(self) -> None:
        self.version = 0
        self.at: Callable[[str, torch.Tensor], Any] = lambda name, tensor: [(name, tensor)]

    def full(self, version: int) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(t, version) for name, t in FULL.items()}

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.full(self.version).items():
            yield from self.at(name, tensor)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def opened(open_setup: Callable[..., Setup], trainer: Trainer, **options: Any) -> Setup:
    """Two trainers and four rollouts at version 1."""
    setup = open_setup([(2, trainer)], SIDE, bucket=20_000, **options)
    trainer.version = 1
    setup.sync.push()
    trainer.version = 2
    return setup


_KILLING = threading.Lock()


def kill_once(setup: Setup, who: str) -> None:
    """Whichever trainer comes first; no other goes on before it is done."""
    with _KILLING:
        if who not in setup.dead:
            setup.kill(who)


def check(setup: Setup, trainer: Trainer, versions: set[int]) -> None:
    for target in setup.targets:
        if target.name not in setup.dead:
            assert target.version in versions, f"RS-3: {target.name} runs {target.version}"
            expected = expected_containers(
                CONFIG, trainer.full(target.version), tp=2, rank=target.rank % 2
            )
            assert_same(target.weights, expected)


@pytest.mark.parametrize("how", ["is not asked", "is not heard", "dies"])
@pytest.mark.parametrize(
    ("stage", "who"),
    [("source_push", "trainer 1"), ("target_confirm", "rollout 0"), ("target_commit", "rollout 3")],
)
def test_rs_3_after_any_failed_phase_every_rollout_is_at_one_version_or_is_named(
    open_setup: Callable[..., Setup], trainer: Trainer, stage: str, who: str, how: str
) -> None:
    setup = opened(open_setup, trainer)
    setup.fault = Fault(stage, who, how)
    with pytest.raises(WeightSyncError) as caught:
        setup.sync.push()
    assert who in caught.value.failed
    check(setup, trainer, {1, 2} if stage == "target_commit" else {1})
    if not setup.dead:
        setup.fault = None
        trainer.version = 3
        setup.sync.push(3)
        check(setup, trainer, {3})


def test_rs_3_a_rollout_that_dies_in_a_push_is_named_and_the_gather_continues(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    setup = opened(open_setup, trainer)
    seen = []

    def at(name: str, tensor: torch.Tensor) -> Any:
        if name == MIDDLE:
            kill_once(setup, "rollout 1")
        seen.append(name)
        return [(name, tensor)]

    trainer.at = at
    with pytest.raises(WeightSyncError) as caught:
        setup.sync.push()
    assert "rollout 1" in caught.value.failed
    assert sorted(seen) == sorted([*FULL] * 2), "other trainers gather with these two"
    check(setup, trainer, {1})


def test_a_rollout_that_dies_in_the_middle_can_be_left_out_and_replaced(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    setup = opened(open_setup, trainer, lost="drop")

    def at(name: str, tensor: torch.Tensor) -> Any:
        if name == MIDDLE:
            kill_once(setup, "rollout 1")
        return [(name, tensor)]

    trainer.at = at
    assert set(setup.sync.push().dropped) == {1}
    check(setup, trainer, {2})
    joined = setup.sync.join(setup.another(rank=1))
    assert joined.version == 2
    trainer.version = 3
    setup.sync.push()
    check(setup, trainer, {3})


def test_rs_3_a_trainer_that_dies_in_the_middle_is_named(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    setup = opened(open_setup, trainer)

    def at(name: str, tensor: torch.Tensor) -> Any:
        if name == MIDDLE:
            kill_once(setup, "trainer 0")
        return [(name, tensor)]

    trainer.at = at
    with pytest.raises(WeightSyncError) as caught:
        setup.sync.push()
    assert caught.value.failed
    check(setup, trainer, {1})


def test_rs_1_a_trainer_that_fails_alone_gathers_to_the_end(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    class Failing(LayoutReplica):
        fails = False

        def load(self, rank: int, tensors: Any) -> None:
            if self.fails:
                raise InvalidArgument("this one can't load")
            super().load(rank, tensors)

    replicas = [Failing(SIDE), Failing(SIDE)]
    setup = opened(open_setup, trainer, replica=iter(replicas).__next__)
    seen = []
    trainer.at = lambda name, tensor: [(name, tensor), seen.append(name)][:1]
    replicas[1].fails = True
    with pytest.raises(WeightSyncError, match="this one can't load") as caught:
        setup.sync.push()
    assert set(caught.value.failed) == {"trainer 1"}
    assert sorted(seen) == sorted([*FULL] * 2), "each gathers with the other"
    check(setup, trainer, {1})
    replicas[1].fails = False
    setup.sync.push()
    check(setup, trainer, {2})


def test_a_push_that_is_overtaken_loads_nothing_more(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    class Counting(LayoutReplica):
        loads = 0

        def load(self, rank: int, tensors: Any) -> None:
            self.loads += 1
            super().load(rank, tensors)

    replica = Counting(SIDE)
    setup = open_setup([(1, trainer)], SIDE, bucket=20_000, replica=lambda: replica)
    setup.sync.connect()
    (source,) = setup.sources
    other = threading.Thread(target=source.close)
    loads, seen = [], []

    def at(name: str, tensor: torch.Tensor) -> Any:
        seen.append(name)
        if name == MIDDLE:
            claim = source._calls_lock.latest
            other.start()
            while source._calls_lock.latest is claim:
                time.sleep(0.001)
            loads.append(replica.loads)
        return [(name, tensor)]

    trainer.at = at
    with pytest.raises(WeightSyncError, match="another push was begun"):
        setup.sync.push()
    other.join()
    assert loads == [replica.loads]
    assert seen == [*FULL], "other trainers gather with this one"
    assert all(target.version is None for target in setup.targets)


@pytest.mark.parametrize(
    ("where", "odd", "words"),
    [
        (MIDDLE, lambda name, t: [], "came, not `model.layers.1.mlp.up_proj.weight`"),
        (MIDDLE, lambda name, t: [(name, t.half())], r"up_proj.weight` \(float16 .* came, not"),
        (MIDDLE, lambda name, t: [(name, t[1:])], r"up_proj.weight` .*\[47, 32\]\) came, not"),
        (MIDDLE, lambda name, t: [(name, t), (name, t)], "up_proj.weight` .* came, not"),
        (LAST, lambda name, t: [], f"`{LAST}` did not come"),
        (LAST, lambda name, t: [(name, t), ("odd", t)], "`odd` .* came, not nothing"),
    ],
    ids=["missing", "dtype", "shape", "twice", "no last", "one more"],
)
def test_other_tensors_than_announced_are_named_and_the_next_version_arrives(
    open_setup: Callable[..., Setup], trainer: Trainer, where: str, odd: Any, words: str
) -> None:
    setup = opened(open_setup, trainer)
    trainer.at = lambda name, t: odd(name, t) if name == where else [(name, t)]
    with pytest.raises(WeightSyncError, match=words):
        setup.sync.push()
    check(setup, trainer, {1})
    trainer.at, trainer.version = lambda name, t: [(name, t)], 3
    setup.sync.push(3)
    check(setup, trainer, {3})


def test_an_inconvertible_tensor_is_named_and_reaches_no_rollout(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    formats = linear_formats("llama", Fp8((8, 8)))
    setup = open_setup(
        [(2, trainer)], quantised_target(SIDE, formats), formats=formats, bucket=13_000
    )
    setup.sync.push()
    trainer.at = lambda name, t: [(name, t / 0 if name == MIDDLE else t)]
    with pytest.raises(WeightSyncError, match=f"{MIDDLE} on rank 0 holds NaN or infinity"):
        setup.sync.push()
    assert {target.version for target in setup.targets} == {1}
    trainer.at = lambda name, t: [(name, t)]
    assert setup.sync.push().version == 2


def test_bytes_changed_after_they_arrived_are_no_version(
    open_setup: Callable[..., Setup], trainer: Trainer
) -> None:
    setup = opened(open_setup, trainer)
    target = setup.targets[2]

    def spoil() -> None:
        target._staging[target._next].views(target._layout)["model.norm.weight"].fill_(-1)

    setup.before["target_confirm"] = spoil
    with pytest.raises(WeightSyncError, match="is corrupt") as caught:
        setup.sync.push()
    assert set(caught.value.failed) == {"rollout 2"}
    check(setup, trainer, {1})


def without(*words: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in FULL.items() if not any(word in name for word in words)}


@pytest.mark.parametrize(
    ("stages", "options", "words"),
    [
        ([(1, without("layers.0.self_attn.k_proj"))], {}, "only a part of .*qkv_proj.* `.*k_proj"),
        ([(1, without("lm_head"))], {}, "no trainer gathers .* `lm_head.weight`"),
        ([(1, FULL), (1, FULL)], {}, r"stages \[0, 1\] all gather"),
        ([(1, FULL | {"odd": torch.zeros(1)})], {}, "no target container needs `odd`"),
        ([(1, {n: t.half() for n, t in FULL.items()})], {}, "got float16 .* expected float32"),
        ([(1, FULL)], {"bucket": 1000}, "`model.embed_tokens.weight` takes .* raise the bucket"),
        ([(1, FULL)], {"bucket": 12_416, "cache": 1}, r"more than the cache of 1; raise"),
        (
            [(1, FULL)],
            {"replica": lambda: LayoutReplica(target_side(CONFIG, tp=1, ranks=range(4)))},
            "replica of trainer 0 has another layout",
        ),
    ],
    ids=["part", "lack", "stages", "extra", "dtype", "bucket", "cache", "layout"],
)
def test_what_does_not_fit_is_refused_in_words_before_anything_is_sent(
    open_setup: Callable[..., Setup], stages: Any, options: dict[str, Any], words: str
) -> None:
    setup = open_setup(stages, SIDE, **options)
    with pytest.raises((WeightSyncError, InvalidArgument, ExtraTensors), match=words):
        setup.sync.push()
    assert all(target.version is None for target in setup.targets)


def test_unneeded_tensors_can_be_left_behind(
    open_setup: Callable[..., Setup],
) -> None:
    one, other = split(FULL, 2)
    setup = open_setup([(1, one), (1, other | {"odd": torch.zeros(9)})], SIDE, leave=("o*d",))
    assert setup.sync.push().left == ("odd",)
    for target in setup.targets:
        assert_same(target.weights, expected_containers(CONFIG, FULL, tp=2, rank=target.rank % 2))


def test_a_weight_source_among_replica_sources_is_refused(
    open_setup: Callable[..., Setup],
) -> None:
    from fabric_ray.weights import WeightSource

    setup = open_setup([(1, FULL)], SIDE)
    plain = WeightSource(FULL, rank=1, name="trainer 1", engine=setup.engines["trainer 0"])
    setup.sync._trainers.actors[1] = "trainer 1"
    with pytest.raises(InvalidArgument, match="trainer 1 holds a WeightSource and others"):
        setup.sync.connect()
    plain.close()
