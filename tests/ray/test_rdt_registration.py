"""A fresh actor has the transport before any of its code runs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
import torch

import fabric_ray

fabric_ray.register()


def fresh_class(**options: Any) -> Any:
    """Travels by value, so that no module of it that registers is imported."""

    @ray.remote(num_cpus=0, enable_tensor_transport=True, **options)
    class Fresh:
        def pid(self) -> int:
            return os.getpid()

        def put(self) -> list[Any]:
            return [ray.put(torch.ones(9), _tensor_transport="fabric")]

        @ray.method(tensor_transport="fabric")
        def make(self) -> torch.Tensor:
            return torch.ones(9)

    return Fresh


def eager_class() -> Any:
    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Eager:
        def __init__(self) -> None:
            self.ref = ray.put(torch.ones(9), _tensor_transport="fabric")

        def put(self) -> list[Any]:
            return [self.ref]

    return Eager


def async_class() -> Any:
    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Async:
        async def put(self) -> list[Any]:
            return [ray.put(torch.ones(9), _tensor_transport="fabric")]

    return Async


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task by which Ray registers transports on an actor comes too late: never."""
    manager = ray._private.worker.global_worker.rdt_manager
    late = lambda actor: manager.actor_id_to_transports_registered.update({actor._actor_id: True})  # noqa: E731
    monkeypatch.setattr(manager, "register_custom_transports_on_actor", late)


def first_total(actor: Any, method: str = "put") -> float:
    got = getattr(actor, method).remote()
    [tensor] = ray.get(ray.get(got)) if method == "put" else [ray.get(got)]
    return float(tensor.sum())


@pytest.mark.parametrize(
    "make",
    [async_class, *(pytest.param(c, marks=pytest.mark.long) for c in (fresh_class, eager_class))],
)
def test_a_first_put_works_however_late_rays_own_registration_is(
    make: Any, unregistered: None
) -> None:
    actor = make().remote()
    assert first_total(actor) == 9
    ray.kill(actor)


@pytest.mark.long
def test_a_first_result_works_however_late_rays_own_registration_is(unregistered: None) -> None:
    actor = fresh_class(max_concurrency=4).remote()
    assert first_total(actor, "make") == 9
    ray.kill(actor)


@pytest.mark.long
def test_a_restarted_actor_that_registers_nothing_puts_again(unregistered: None) -> None:
    actor = fresh_class(max_restarts=1, max_task_retries=3).remote()
    first = ray.get(actor.pid.remote())
    os.kill(first, signal.SIGKILL)
    assert ray.get(actor.pid.remote()) != first
    assert first_total(actor) == 9
    ray.kill(actor)


@pytest.mark.long
def test_many_fresh_actors_put_with_their_first_call() -> None:
    made = [fresh_class().remote() for _ in range(12)]
    assert [first_total(actor) for actor in made] == [9.0] * 12
    for actor in made:
        ray.kill(actor)


@pytest.mark.long
def test_a_class_that_was_exported_before_it_had_the_transport_has_it_from_then_on(
    unregistered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = fresh_class()
    with monkeypatch.context() as before:
        before.setattr(ray.actor.ActorClass, "_remote", ray.actor.ActorClass._remote.__wrapped__)
        early = late.remote()
        with pytest.raises(ray.exceptions.RayTaskError, match="Invalid tensor transport"):
            first_total(early)
    actor = late.remote()
    assert first_total(actor) == 9
    for each in (early, actor):
        ray.kill(each)
