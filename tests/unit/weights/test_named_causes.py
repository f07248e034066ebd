"""Errors name the cause of what failed, and advice in them works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayTaskError

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.plan.errors import DtypeMismatch
from fabric_ray.runtime.causes import cause_of
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.calls import DIED, _call_failure
from fabric_ray.weights.quant import Cast
from tests.unit.weights.local_sync import InProcess, LocalSync

TRACEBACK = """ray::Trainer.__init__() (pid=7, ip=10.0.0.1, repr=<Trainer>)
  File "train.py", line 12, in __init__
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero
{more}"""


@pytest.mark.parametrize("more", ["", "in two lines\n"])
def test_what_an_init_raised_is_the_cause_of_a_dead_actor(more: str) -> None:
    raised = RayTaskError("__init__", TRACEBACK.format(more=more), ZeroDivisionError(), "p", 7, "h")
    error = ActorDiedError(raised)
    answer = _call_failure(error, 5.0)
    said = f"ZeroDivisionError: division by zero {more}".strip()
    assert answer.cause == f"its actor has died: its __init__ raised {said}"
    assert (answer.kind, answer.error) == (DIED, error)


def test_what_a_call_raised_is_its_own_cause() -> None:
    cause = KeyError("w")
    answer = _call_failure(RayTaskError("f", "traceback", cause, "p", 7, "h"), 5.0)
    assert (answer.cause, answer.error) == ("KeyError: 'w'", cause)
    assert cause_of(RayTaskError("f", "traceback", cause, "p", 7, "h")) == "KeyError: 'w'"


def test_a_process_that_ended_says_how() -> None:
    error = ActorDiedError()
    error.error_msg = (
        "The actor died.\n\tclass_name: A\n\tpid: 7\nIts worker process has died. OOM."
    )
    assert cause_of(error) == "Its worker process has died. OOM."
    assert cause_of(ActorDiedError()) == ActorDiedError.BASE_ERROR_MSG


@pytest.mark.parametrize("stage", ["source_push", "target_confirm", "target_commit", "target_meta"])
def test_an_error_of_a_push_is_raised_from_what_an_actor_raised(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = MemoryError("no more")

    class Raising(LocalSync):
        def ask(self, actors, function, args, timeout):  # type: ignore[no-untyped-def]
            answers = super().ask(actors, function, args, timeout)
            if function.__name__ == stage:
                answers[0] = _call_failure(RayTaskError("f", "trace", raised, "p", 7, "h"), timeout)
            return answers

    sync = Raising()
    try:
        with pytest.raises(WeightSyncError, match="MemoryError: no more") as caught:
            sync.push()
        assert caught.value.__cause__ is raised
    finally:
        sync.close()


def test_actors_that_are_no_list_are_refused_with_what_to_pass() -> None:
    actor = object()
    with pytest.raises(InvalidArgument, match=r"trainers is object, expected .* pass \[trainer\]"):
        WeightSync(actor, [actor])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"rollouts is object, expected .* pass \[rollout\]"):
        WeightSync([actor], actor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "held", "words"),
    [
        (
            "trainer",
            [0, 0],
            r"hold ranks \[0, 0\]: rank 0 more than once, expected each of \[0, 1\]",
        ),
        ("rollout", [1, 1], r"rank 1 more than once, .*; give each rollout its index in Weight"),
        ("trainer", [0, 5], r"ranks \[0, 5\], expected \[0, 1\]; pass one trainer for each rank"),
        ("trainer", [1, 0], r"hold ranks \[1, 0\]; pass them in the order of ranks"),
    ],
)
def test_ranks_that_no_order_mends_are_refused_with_other_advice(
    role: str, held: list[int], words: str
) -> None:
    sync = LocalSync()
    try:
        for end, rank in zip(
            getattr(sync, "sources" if role == "trainer" else "targets"), held, strict=True
        ):
            end.rank = rank
        with pytest.raises(InvalidArgument, match=words) as caught:
            sync.connect()
        assert ("in the order" in str(caught.value)) == (len(set(held)) == len(held))
    finally:
        sync.close()


@pytest.fixture
def pair() -> Iterator[Callable[[str, torch.Tensor], WeightTarget]]:
    with (
        TransferEngine(name="trainer", transport="shm") as a,
        TransferEngine(name="rollout", transport="shm") as b,
    ):
        made = []

        def make(dtype: str, tensor: torch.Tensor) -> WeightTarget:
            kind = DType.of(dtype)
            leaf = Leaf(Tensor("w", tuple(tensor.shape), kind), Mesh.line([0]), (Replicate(),))
            target = WeightTarget(Side.of(1, [Container("w", kind, leaf)]), rank=0, engine=b)
            made.extend([target, WeightSource({"w": tensor}, rank=0, engine=a)])
            return target

        yield make
        for part in made:
            part.close()


def test_masters_in_float32_are_cast_as_the_error_advises(pair) -> None:
    tensor = torch.linspace(-1, 1, 33, dtype=torch.float32)
    target = pair("bfloat16", tensor)
    actors = ["default"], ["default"]
    with pytest.raises(DtypeMismatch) as caught:
        WeightSync(*actors, calls=InProcess()).push()
    advice = 'WeightSync(formats={"*": Cast("bfloat16")})'
    assert advice in str(caught.value)
    WeightSync(*actors, calls=InProcess(), formats={"*": Cast("bfloat16")}).push()
    with target.reading() as weights:
        assert torch.equal(weights["w"], tensor.bfloat16())


def test_no_cast_is_advised_where_none_would_do(pair) -> None:
    pair("int16", torch.zeros(4, dtype=torch.float32))
    with pytest.raises(DtypeMismatch) as caught:
        WeightSync(["default"], ["default"], calls=InProcess()).push()
    assert "Cast" not in str(caught.value)
