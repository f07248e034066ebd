"""Errors name the cause of what failed, and advice in them works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayTaskError

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.plan.errors import DtypeMismatch, MissingTensors
from fabric_ray.runtime.causes import cause_of
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.calls import DIED, RayCalls, _call_failure
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


def test_a_long_cause_ends_after_a_word() -> None:
    error = ActorDiedError()
    error.error_msg = "The actor died.\n" + "disconnected " * 80
    said = cause_of(error)
    assert set(said.split()) == {"disconnected", "..."}
    assert 380 < len(said) < 410


def test_an_actor_that_is_slow_to_start_is_not_called_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray
    from ray.exceptions import GetTimeoutError

    class Handle:
        class __ray_call__:
            @staticmethod
            def remote(*_: object) -> str:
                return "reference"

    def late(*_: object, **__: object) -> None:
        raise GetTimeoutError("late")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    calls, actors = RayCalls(), [Handle()]
    monkeypatch.setattr(ray, "get", late)
    [slow] = calls.ask(actors, print, [()], 7.0)
    assert slow.cause.startswith(
        "it is not ready yet after 7 s, for it has answered no call so far"
    )
    assert "ray list actors" in slow.cause
    monkeypatch.setattr(ray, "get", lambda *_, **__: 3)
    assert calls.ask(actors, print, [()], 7.0) == [3]
    monkeypatch.setattr(ray, "get", late)
    [hangs] = calls.ask(actors, print, [()], 7.0)
    assert hangs.cause == "it did not answer within 7 s; see whether it is stuck"


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("rollout 1", r"; drop\(\) rollout 1, and join\(\) a .*: WeightSync\(lost=\"drop\"\)$"),
        ("trainer 0", "; restart trainer 0, and make a WeightSync of the trainers anew$"),
    ],
)
def test_the_error_says_what_to_do_about_a_dead_actor(who: str, words: str) -> None:
    sync = LocalSync()
    try:
        sync.push()
        sync.kill(who)
        for _ in range(2):
            with pytest.raises(WeightSyncError, match=words) as caught:
                sync.push()
            assert str(caught.value).count("drop()") == (who == "rollout 1")
    finally:
        sync.close()


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


def test_what_is_no_actor_handle_is_refused_before_any_call() -> None:
    import ray

    def handle() -> Any:
        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=print))

    one, other = handle(), handle()
    actor_class = ray.remote(LocalSync)
    words = r"rollouts\[1\] is .*, expected an actor handle; pass what ray.remote\(Class\).remote"
    for bad in (object(), actor_class, "rollout"):
        with pytest.raises(InvalidArgument, match=words):
            WeightSync([one], [other, bad])
    with pytest.raises(InvalidArgument, match=r"trainers\[1\] is the actor of trainers\[0\] again"):
        WeightSync([one, one], [other])
    with pytest.raises(InvalidArgument, match=r"rollout\[0\] is int, expected an actor handle"):
        WeightSync([one], [other]).join(3)


def test_trainers_and_rollouts_that_are_swapped_are_named() -> None:
    sync = LocalSync()
    trainers, rollouts = ["trainer 0", "trainer 1"], ["rollout 0", "rollout 1"]
    calls = InProcess()
    try:
        with pytest.raises(WeightSyncError, match="it holds a WeightTarget called") as caught:
            WeightSync(rollouts, trainers, calls=calls).connect()
        assert "pass WeightSync(trainers, rollouts) in this order" in str(caught.value)
        with pytest.raises(WeightSyncError, match="it holds a WeightSource called"):
            WeightSync(trainers, trainers, calls=calls).connect()
    finally:
        sync.close()


@pytest.fixture
def ends() -> Iterator[Callable[[dict[str, str], dict[str, torch.Tensor]], WeightTarget]]:
    """Makes a trainer of tensors and a rollout that holds them in these dtypes."""
    with (
        TransferEngine(name="trainer", transport="shm") as a,
        TransferEngine(name="rollout", transport="shm") as b,
    ):
        made = []

        def make(dtypes: dict[str, str], tensors: dict[str, torch.Tensor]) -> WeightTarget:
            containers = []
            for name, dtype in dtypes.items():
                kind, shape = DType.of(dtype), tuple(tensors[name].shape)
                leaf = Leaf(Tensor(name, shape, kind), Mesh.line([0]), (Replicate(),))
                containers.append(Container(name, kind, leaf))
            target = WeightTarget(Side.of(1, containers), rank=0, engine=b)
            made.extend([target, WeightSource(tensors, rank=0, engine=a)])
            return target

        yield make
        for part in made:
            part.close()


@pytest.fixture
def pair(ends) -> Callable[[str, torch.Tensor], WeightTarget]:
    return lambda dtype, tensor: ends({"w": dtype}, {"w": tensor})


def test_masters_in_float32_are_cast_as_the_error_advises(pair) -> None:
    tensor = torch.linspace(-1, 1, 33, dtype=torch.float32)
    target = pair("bfloat16", tensor)
    actors = ["default"], ["default"]
    with pytest.raises(DtypeMismatch) as caught:
        WeightSync(*actors, calls=InProcess(), formats={}).push()
    advice = 'WeightSync(formats={"*": Cast("bfloat16")})'
    assert advice in str(caught.value)
    WeightSync(*actors, calls=InProcess(), formats={"*": Cast("bfloat16")}).push()
    with target.reading() as weights:
        assert torch.equal(weights["w"], tensor.bfloat16())


MODEL = {
    "layers.0.norm.weight": "float32",
    "layers.0.up.bias": "float32",
    "layers.0.up.weight": "bfloat16",
    "layers.1.norm.weight": "float32",
    "layers.1.up.bias": "float32",
    "layers.1.up.weight": "bfloat16",
    "head": "float16",
    "positions": "int64",
}
CASTS = '"*.up.weight": Cast("bfloat16"), "head": Cast("float16")'
BF16, F16 = Cast("bfloat16"), Cast("float16")


@pytest.mark.parametrize(
    ("dtypes", "formats", "entries"),
    [
        (dict.fromkeys(MODEL, "bfloat16") | {"positions": "int64"}, {}, '"*": Cast("bfloat16")'),
        (MODEL, {}, CASTS),
        (
            MODEL,
            {"*": BF16},
            '"*.norm.weight": Cast("float32"), "*.bias": Cast("float32"), "head": Cast("float16"), '
            "**formats",
        ),
        (MODEL, {"head": F16}, '**formats, "*.up.weight": Cast("bfloat16")'),
        (MODEL, {"*.weight": BF16, "head": BF16, "*.norm.*": F16}, None),
    ],
)
def test_rs_1_the_casts_that_an_error_advises_resolve_all_mismatches(
    ends, dtypes: dict[str, str], formats: dict[str, Cast], entries: str | None
) -> None:
    tensors = {name: torch.linspace(-1, 1, 33) for name in MODEL}
    tensors["positions"] = torch.arange(33)
    target = ends(dtypes, tensors)
    actors = ["default"], ["default"]
    with pytest.raises(DtypeMismatch) as caught:
        WeightSync(*actors, calls=InProcess(), formats=formats).push()
    [advice] = re.findall(r"WeightSync\(formats=({.*})\), with", str(caught.value))
    if entries is not None:
        assert advice == f"{{{entries}}}"
    followed = eval(advice, {"Cast": Cast, "formats": formats})
    WeightSync(*actors, calls=InProcess(), formats=followed).push()
    with target.reading() as weights:
        for name, dtype in dtypes.items():
            assert torch.equal(weights[name], tensors[name].to(getattr(torch, dtype)))


def test_a_tensor_that_no_trainer_holds_is_advised_in_the_terms_of_a_push(pair) -> None:
    target = pair("int16", torch.zeros(4, dtype=torch.int16))
    leaf = Leaf(Tensor("v", (4,), DType.of("int16")), Mesh.line(1), (Replicate(),))
    more = Container("v", DType.of("int16"), leaf)
    target.side = Side.of(1, [*target.side.containers, more])
    with pytest.raises(MissingTensors, match="no trainer holds tensor `v`, which") as caught:
        WeightSync(["default"], ["default"], calls=InProcess()).push()
    assert "give it to a WeightSource: the module itself" in str(caught.value)
    assert "taken out keeps its values" in str(caught.value)
    assert "from the target" not in str(caught.value)


def test_a_misspelt_name_stands_beside_the_name_that_the_trainer_has(pair) -> None:
    target = pair("int16", torch.zeros(4, dtype=torch.int16))
    container = target.side.containers[0]
    name = container.layout.tensor.name
    leaf = msgspec.structs.replace(
        container.layout, tensor=msgspec.structs.replace(container.layout.tensor, name=name + "s")
    )
    target.side = Side.of(1, [msgspec.structs.replace(container, layout=leaf)])
    said = f"`{name}s`, which .* no rollout needs the trainers' `{name}`: correct the name"
    with pytest.raises(MissingTensors, match=said):
        WeightSync(["default"], ["default"], calls=InProcess()).push()


def test_no_cast_is_advised_where_none_would_do(pair) -> None:
    pair("int16", torch.zeros(4, dtype=torch.float32))
    with pytest.raises(DtypeMismatch) as caught:
        WeightSync(["default"], ["default"], calls=InProcess()).push()
    assert "Cast" not in str(caught.value)
