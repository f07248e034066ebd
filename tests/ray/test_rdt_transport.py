"""What Ray's transports are held to: tensors by reference between actors and drivers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import (
    GetTimeoutError,
    RayDirectTransportError,
    RayTaskError,
)
from ray.experimental import set_target_device_for_ref, set_target_for_ref, wait_tensor_freed

import fabric_ray
from tests.ray.rdt_actors import Async, Peer, same, tree

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Any]]:
    actors = [Peer.remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


def until(found: Callable[[], bool]) -> bool:
    """Whether it comes true: Ray frees objects in the background."""
    end = time.monotonic() + 60
    while not found() and time.monotonic() < end:
        time.sleep(0.02)
    return found()


def nothing_held(actor: Any) -> bool:
    objects, sources, _ = ray.get(actor.held.remote())
    return (objects, sources) == (0, 0)


def test_an_argument_brings_its_tensors(peers: list[Any]) -> None:
    a, b, _ = peers
    assert ray.get(b.is_tree.remote(a.make.remote(3.0), 3.0))


def test_many_actors_read_one_object_and_one_actor_many(peers: list[Any]) -> None:
    a, b, c = peers
    one = a.make.remote(2.0)
    assert all(ray.get([reader.is_tree.remote(one, 2.0) for reader in (b, c, b)]))
    many = [a.make.remote(4.0) for _ in range(8)]
    assert ray.get(b.total.remote(*many)) == 8 * ray.get(c.total.remote(many[0]))


def test_the_actor_itself_gets_the_very_tensor(peers: list[Any]) -> None:
    a = peers[0]
    assert ray.get(a.is_kept.remote(a.keep.remote(1000)))


def test_the_driver_puts_and_gets(peers: list[Any]) -> None:
    a, b, _ = peers
    put = ray.put(tree(5.0), _tensor_transport="fabric")
    assert ray.get([actor.is_tree.remote(put, 5.0) for actor in (a, b)]) == [True, True]
    assert same(ray.get(a.make.remote(6.0)), tree(6.0))


def test_what_an_actor_puts_others_get_from_within_a_list(peers: list[Any]) -> None:
    a, b, c = peers
    refs = [ray.get(each.put.remote(7.0))[0] for each in (a, a, c)]
    assert ray.get(b.fetch.remote(refs, 7.0))
    assert same(ray.get(refs[0]), tree(7.0))


def test_many_references_are_fetched_at_once(peers: list[Any]) -> None:
    refs = [peers[i % 3].make.remote(float(i)) for i in range(24)]
    for i, got in enumerate(ray.get(refs)):
        assert same(got, tree(float(i)))


def test_tensors_come_into_given_memory(peers: list[Any]) -> None:
    a, b, _ = peers
    given = [torch.zeros(1000), torch.zeros(10), torch.zeros(5, 77)]
    ref = a.views.remote()
    set_target_for_ref(ref, given)
    got = ray.get(ref)
    assert got[0] is got[1]  # what was one tensor there is one here
    assert all(x is y for x, y in zip(got[1:], given, strict=True))
    assert torch.equal(given[0], torch.arange(1000.0))
    assert torch.equal(given[2], torch.arange(15.0, 400).view(5, 77))
    kept = ray.put(torch.ones(300_000), _tensor_transport="fabric")
    assert ray.get(b.fetch_into.remote([kept], 300_000)) == (300_000.0, True)


def test_memory_that_does_not_suit_is_refused(peers: list[Any]) -> None:
    ref = peers[0].keep.remote(1000)
    short = torch.zeros(999)
    set_target_for_ref(ref, [short])
    with pytest.raises(ValueError, match="Shape"):
        ray.get(ref)
    set_target_device_for_ref(ref, "cpu")
    assert ray.get(ref).shape == (1000,)


def test_everything_ends_with_the_last_reference(peers: list[Any]) -> None:
    a, b, _ = peers
    assert until(lambda: nothing_held(a))
    # Memory of tests before is let go of once peers have said that they don't read it any more.
    looks = [ray.get(a.held.remote())]

    def settled() -> bool:
        time.sleep(0.3)
        looks.append(ray.get(a.held.remote()))
        return looks[-3:] == [looks[-1]] * 3

    assert until(settled)
    before = looks[-1]
    refs = [a.views.remote() for _ in range(3)]
    assert ray.get(b.total.remote(*refs)) > 0
    assert ray.get(a.held.remote()) == (3, 3, before[2] + 3)  # each call has made a tensor
    del refs[1:]
    assert until(lambda: ray.get(a.held.remote()) == (1, 1, before[2] + 1))
    del refs
    assert until(lambda: ray.get(a.held.remote()) == before)


def test_the_drivers_tensor_is_free_when_the_last_reference_is_gone(peers: list[Any]) -> None:
    tensor = torch.ones(1000)
    refs = [ray.put(tensor[i:], _tensor_transport="fabric") for i in range(3)]
    assert ray.get(peers[0].total.remote(*refs)) == 2997
    whole = ray.put(tensor, _tensor_transport="fabric")
    with pytest.raises(TimeoutError):
        wait_tensor_freed(tensor, timeout=0)
    del whole, refs
    wait_tensor_freed(tensor, timeout=30)


def test_a_reference_that_is_dropped_before_its_object_is_made_leaves_nothing(
    peers: list[Any],
) -> None:
    a, b, _ = peers
    assert until(lambda: nothing_held(a))
    ref = a.make.remote(1.0)
    done = b.is_tree.remote(ref, 1.0)
    del ref
    assert ray.get(done)
    unread = a.make.remote(1.0)
    del unread
    ray.get(a.pid.remote())
    assert until(lambda: nothing_held(a))


def test_an_object_without_tensors_travels_too(peers: list[Any]) -> None:
    a, b, _ = peers
    assert ray.get(a.none.remote()) == {"step": 3}
    assert ray.get(b.total.remote(a.none.remote())) == 0


def test_a_tensor_that_cannot_be_offered_is_an_error_and_leaves_nothing(peers: list[Any]) -> None:
    a = peers[0]
    assert until(lambda: nothing_held(a))
    with pytest.raises(RayTaskError, match="sparse"):
        ray.get(a.sparse.remote())
    assert nothing_held(a)
    with pytest.raises(fabric_ray.errors.InvalidArgument, match="sparse"):
        ray.put(torch.eye(4).to_sparse(), _tensor_transport="fabric")


@pytest.mark.long
def test_an_event_loop_fetches_in_a_thread(peers: list[Any]) -> None:
    reader = Async.remote()
    refs = [peers[0].put.remote(1.0), peers[1].put.remote(1.0)]
    puts = [ray.get(ref)[0] for ref in refs]
    kept = [ray.put(torch.ones(9), _tensor_transport="fabric") for _ in puts]
    assert ray.get(reader.total.remote(kept)) == 18


# What Ray 2.60 doesn't do. docs/ray-transport.md tells users; a Ray that does it shows here.


@pytest.fixture
def forsaken() -> Iterator[Any]:
    """An actor of its own: what fails in Ray may keep references to its objects for good."""
    actor = Peer.remote()
    yield actor
    ray.kill(actor)


@pytest.mark.long
def test_a_reference_can_not_be_awaited() -> None:
    """It never comes, or Ray's own error does; the tensor doesn't.

    In an actor: awaited here, it would hold up whatever this process asks of Ray for a minute.
    """
    kept = ray.put(torch.ones(9), _tensor_transport="fabric")
    said = ray.get(Async.remote().awaits.remote([kept]))
    assert "TimeoutError" in said or "rdt_tensors" in said


@pytest.mark.long
def test_a_reference_within_a_list_can_be_passed_only_when_its_object_is_made() -> None:
    late, reader = Peer.remote(), Peer.remote()
    pid = ray.get(late.pid.remote())
    # Ray waits, at an actor's first such call, for what registers transports there.
    ray.wait([late.make_ones.remote()])
    os.kill(pid, signal.SIGSTOP)  # it makes nothing now
    try:
        ref = late.make_ones.remote()
        with pytest.raises(NotImplementedError, match="metadata is not available"):
            reader.total_of.remote([ref])
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.wait([ref])

    def passes() -> bool:
        # Ray comes to know where the object lies a moment after it is made.
        try:
            return bool(ray.get(reader.total_of.remote([ref])) == 9)
        except NotImplementedError:
            return False

    assert until(passes)
    for actor in (late, reader):
        ray.kill(actor)


@pytest.mark.long
def test_a_task_can_not_be_given_a_reference(forsaken: Any) -> None:
    @ray.remote(num_cpus=0)
    def total(tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    # One of Ray's errors at once, the other after a minute, which isn't waited for.
    words = r"rdt_tensors|RDT object store|timed out"
    with pytest.raises((RayTaskError, GetTimeoutError), match=words):
        ray.get(total.remote(forsaken.make_ones.remote()), timeout=10)


def test_gradients_are_not_asked_of_what_arrives_unless_it_is_a_parameter(
    peers: list[Any],
) -> None:
    a, b, _ = peers
    came = [("Tensor", False), ("Parameter", True)]
    ref = a.with_gradients.remote()
    assert ray.get(b.kinds.remote(ref)) == came
    assert [(type(t).__name__, t.requires_grad) for t in ray.get(ref)] == came


def test_methods_of_an_actor_with_tensors_do_not_run_on_the_main_thread(peers: list[Any]) -> None:
    assert not ray.get(peers[0].on_main_thread.remote())


def test_registering_again_changes_nothing() -> None:
    for _ in range(3):
        fabric_ray.register()


@pytest.mark.long
def test_rs_4_a_fetch_names_a_holder_that_was_killed() -> None:
    dying, reader, late = Peer.remote(), Peer.remote(), Peer.remote()
    who = ray.get(dying.id.remote())
    ref = dying.make.remote(1.0)
    assert ray.get(reader.is_tree.remote(ref, 1.0))
    os.kill(ray.get(dying.pid.remote()), signal.SIGKILL)
    # By one that knew it, one that never met it, and the driver.
    for fetching in (reader, late):
        with pytest.raises(RayTaskError, match=who):
            ray.get(fetching.total.remote(ref), timeout=120)
    with pytest.raises(RayDirectTransportError, match="produce the object again"):
        ray.get(ref, timeout=120)
    assert ray.get(reader.is_tree.remote(ray.put(tree(2.0), _tensor_transport="fabric"), 2.0))
    for actor in (reader, late):
        ray.kill(actor)


def test_a_killed_reader_does_not_affect_other_readers(peers: list[Any]) -> None:
    a, b, _ = peers
    dying = Peer.remote()
    ref = a.make.remote(1.0, 3_000_000)
    assert ray.get(dying.is_tree.remote(ref, 1.0, 3_000_000))
    ray.kill(dying)
    assert ray.get(b.is_tree.remote(ref, 1.0, 3_000_000))
    del ref
    assert until(lambda: nothing_held(a))


@pytest.mark.long
def test_a_restarted_actor_makes_and_takes_objects_again(peers: list[Any]) -> None:
    a = peers[0]
    actor = Peer.options(max_restarts=1, max_task_retries=3).remote()
    old = actor.make.remote(1.0)
    assert ray.get(a.is_tree.remote(old, 1.0))
    first = ray.get(actor.pid.remote())
    os.kill(first, signal.SIGKILL)
    assert ray.get(actor.pid.remote()) != first
    assert ray.get(a.is_tree.remote(actor.make.remote(2.0), 2.0))
    assert ray.get(actor.is_tree.remote(a.make.remote(3.0), 3.0))
    with pytest.raises(RayTaskError, match="produce the object again"):
        ray.get(a.total.remote(old), timeout=120)
    ray.kill(actor)


# In a process of its own: the hook is the job's.
PROGRAM = """
import os, signal, sys
import ray, torch
import fabric_ray

hook = {"worker_process_setup_hook": "fabric_ray.register"}
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error", runtime_env=hook)
fabric_ray.register()

@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Forgetful:
    def pid(self):
        return os.getpid()

    @ray.method(tensor_transport="fabric")
    def make(self, value):
        return torch.full((1000,), value)

    def total(self, tensor):
        return float(tensor.sum())

@ray.remote(num_cpus=0)
def make():
    lasting = {"lifetime": "detached", "name": "forgetful"}
    return Forgetful.options(max_restarts=1, max_task_retries=3, **lasting).remote()

actor = ray.get(make.remote())
reader = Forgetful.remote()
first = ray.get(reader.total.remote(actor.make.remote(1.0)))
os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
print("totals", first, ray.get(reader.total.remote(actor.make.remote(2.0))))
ray.kill(actor)
ray.shutdown()
"""


@pytest.mark.long
def test_the_setup_hook_reaches_actors_that_tasks_make_and_that_restart() -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "totals 1000.0 2000.0" in done.stdout
