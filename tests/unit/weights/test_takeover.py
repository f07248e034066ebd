"""MR-2: once another controller has connected, pushes of an older session write nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Cast
from tests.unit.weights.local_sync import HELD, InProcess, LocalSync, expected, values

TRAINERS = [f"other {i}" for i in range(len(HELD))]


@pytest.fixture
def other_trainers() -> Iterator[None]:
    """Trainers of another run, which hold version 7."""
    engines = [TransferEngine(name=who, transport="shm") for who in TRAINERS]
    sources = [
        WeightSource({n: values(n, 7) for n in held}, rank=rank, name=who, engine=engine)
        for rank, (who, held, engine) in enumerate(zip(TRAINERS, HELD, engines, strict=True))
    ]
    yield
    for part in (*sources, *engines):
        part.close()


def by_others(sync: LocalSync, timeout: float = 20.0) -> WeightSync:
    """A controller of other trainers and the same rollouts."""
    rollouts = [target.name for target in sync.targets]
    return WeightSync(TRAINERS, rollouts, timeout=timeout, calls=sync)


@pytest.mark.usefixtures("other_trainers")
@pytest.mark.parametrize("staged", [True, False])
def test_mr_2_trainers_of_an_old_session_write_no_byte_after_a_new_connect(
    open_sync: Callable[..., LocalSync], staged: bool
) -> None:
    old = open_sync(staged=staged)
    assert old._session is not None
    session, push_targets = old._session._id, list(old._session._push_targets.values())
    new = by_others(old)
    new.connect()
    for rank in range(len(old.targets)):
        for tensor in old.arriving(rank).values():
            tensor.fill_(-1)
    # They haven't heard of it: to them, their session is the latest.
    sent = old.sources[0].push(session, 2, push_targets, timeout=20.0)
    assert sent.links == (), "MR-2: a key from before the connect opens nothing"
    assert set(sent.failed) == {0, 1}
    assert all("not registered under this key any more" in why for why in sent.failed.values())
    for rank in range(len(old.targets)):
        for name, tensor in old.arriving(rank).items():
            assert bool((tensor == -1).all()), f"MR-2: `{name}` of rollout {rank} was written to"
    report = new.push(7)
    assert report.version == 7
    for rank, target in enumerate(old.targets):
        for name, want in expected(rank, 7).items():
            assert torch.equal(target.weights[name], want)


@pytest.mark.usefixtures("other_trainers")
@pytest.mark.parametrize("staged", [True, False])
def test_rs_3_a_controller_that_was_replaced_moves_no_rollout(
    open_sync: Callable[..., LocalSync], staged: bool
) -> None:
    old = open_sync(staged=staged)
    new = by_others(old)
    new.push(7)
    # In place rollouts are told first; staged, the old key is refused.
    told = "is stale" if staged else "another WeightSync has connected"
    with pytest.raises(WeightSyncError, match=told) as caught:
        old.push()
    assert {"rollout 0", "rollout 1"} <= set(caught.value.failed)
    assert "stay at" not in str(caught.value), "they are at the other's version"
    for rank, target in enumerate(old.targets):
        assert target.version == 7
        for name, want in expected(rank, 7).items():
            assert torch.equal(target.weights[name], want)
    assert new.push(8).version == 8


@pytest.mark.parametrize(
    ("held", "ours", "theirs"),
    [("float32", "bfloat16", "float16"), ("bfloat16", "float16", "bfloat16")],
)
def test_rs_1_no_push_is_converted_as_the_connect_of_another_controller_asked(
    open_engine: Callable[..., TransferEngine], held: str, ours: str, theirs: str
) -> None:
    def side(dtype: str) -> Side:
        leaf = Leaf(Tensor("w", (8, 8), DType.of(dtype)), Mesh.line(1), (Replicate(),))
        return Side.of(1, [Container("w", DType.of(dtype), leaf)])

    weights = torch.randn(8, 8).to(getattr(torch, held))
    tensors, calls = {"w": weights}, InProcess()
    source = WeightSource(tensors, rank=0, name="trainer", engine=open_engine("trainer"))
    targets = {
        dtype: WeightTarget(side(dtype), rank=0, name=dtype, engine=open_engine(dtype))
        for dtype in (ours, theirs)
    }
    formats = {dtype: {"w": Cast(dtype)} if dtype != held else {} for dtype in targets}
    first, second = (
        WeightSync(["trainer"], [dtype], formats=formats[dtype], digest=True, calls=calls)
        for dtype in targets
    )
    first.push()
    # The second controller reaches the trainer, which fails before it has taken its share.
    calls.before["source_accept"] = lambda: tensors.update(w=weights[:4])
    with pytest.raises(WeightSyncError, match=r"`w` (of rank 0 is|.*differs)"):
        second.connect()
    calls.before.clear()
    tensors.update(w=weights)
    with pytest.raises(WeightSyncError, match="another WeightSync has connected"):
        first.push()
    assert torch.equal(targets[ours].weights["w"], weights.to(getattr(torch, ours)))
    first.connect()
    first.push()
    assert torch.equal(targets[ours].weights["w"], weights.to(getattr(torch, ours)))
    for part in (source, *targets.values()):
        part.close()
