"""Who is where: leases, lives and names."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import ray

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, Stale
from fabric_ray.runtime import directory
from fabric_ray.runtime.directory import DirectoryState


@pytest.fixture
def two_lives() -> tuple[TransferEngine, TransferEngine]:
    return TransferEngine(name="same"), TransferEngine(name="same")


def test_a_lease_ends_unless_renewed(two_lives: tuple[TransferEngine, TransferEngine]) -> None:
    state = DirectoryState(lease_s=10)
    with two_lives[0] as engine, two_lives[1]:
        state.publish("a", engine.address.to_bytes(), now=0)
        assert state.lookup("a", now=9) is not None
        assert state.renew("a", engine.id, now=9) == "renewed"
        assert state.lookup("a", now=18) is not None
        assert state.entries(now=19) == []
        assert state.renew("a", engine.id, now=19) == "unknown"


def test_a_restart_takes_the_name_over(two_lives: tuple[TransferEngine, TransferEngine]) -> None:
    state = DirectoryState(lease_s=10)
    with two_lives[0] as old, two_lives[1] as new:
        assert state.publish("a", old.address.to_bytes(), now=0) is None
        assert state.publish("a", old.address.to_bytes(), now=0) is None
        before = state.publish("a", new.address.to_bytes(), now=1)
        assert before is not None
        assert before.incarnation == old.id
        # What the old life still says changes nothing.
        assert state.renew("a", old.id, now=2) == "superseded"
        assert not state.withdraw("a", old.id)
        entry = state.lookup("a", now=2)
        assert entry is not None
        assert entry.incarnation == new.id
        assert state.withdraw("a", new.id)
        state.publish("a", old.address.to_bytes(), now=3)
        assert state.publish("a", new.address.to_bytes(), now=13) is None, "its lease had ended"
        with pytest.raises(InvalidArgument, match="name"):
            state.publish("", new.address.to_bytes())


class Holder:
    def open(self, name: str) -> str:
        from fabric_ray import runtime

        self.engine = runtime.engine(name=name)
        return self.engine.id

    def greet(self, name: str) -> int:
        """Writes one counted word to the engine called ``name``; its region comes as a message."""
        peer = self.engine.peer(directory().lookup(name, timeout=10))
        self.engine.send(peer, b"hello").wait(10)
        return 5

    def warnings_of_open(self, name: str) -> list[str]:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fabric_ray.runtime").addHandler(handler)
        self.open(name)
        return heard

    def leave(self) -> None:
        from fabric_ray import runtime

        runtime.shutdown()

    def listen(self) -> None:
        import queue

        self.heard: Any = queue.Queue()
        self.engine.receive(lambda message: self.heard.put(bytes(message.data)))

    def hear(self) -> bytes:
        heard: bytes = self.heard.get(timeout=20)
        return heard


def test_actors_find_each_other_by_name(cluster: list[str]) -> None:
    holder: Any = ray.remote(Holder)
    a, b = (holder.options(num_cpus=0).remote() for _ in range(2))
    try:
        ids = ray.get([a.open.remote("alpha"), b.open.remote("beta")])
        assert directory().lookup("alpha").id == ids[0]
        assert {"alpha", "beta"} <= {entry.name for entry in directory().entries()}
        ray.get(b.listen.remote())
        ray.get(a.greet.remote("beta"))
        assert ray.get(b.hear.remote()) == b"hello"
        with pytest.raises(Stale, match="gamma"):
            directory().lookup("gamma")
        ray.get(b.leave.remote())
        with pytest.raises(Stale, match="beta"):
            directory().lookup("beta")
        assert ray.get(b.open.remote("beta")) == directory().lookup("beta").id != ids[1]
    finally:
        ray.kill(a)
        ray.kill(b)


def test_a_name_that_is_taken_is_told_to_who_takes_it_over(cluster: list[str]) -> None:
    holder: Any = ray.remote(Holder)
    a, b = (holder.options(num_cpus=0).remote() for _ in range(2))
    try:
        assert ray.get(a.warnings_of_open.remote("twice")) == []
        first = directory().lookup("twice").id
        (warning,) = ray.get(b.warnings_of_open.remote("twice"))
        assert first[:8] in warning
        assert a._actor_id.hex() in warning
    finally:
        ray.kill(a)
        ray.kill(b)


def _own_name() -> tuple[str, str]:
    """The default name of this process's engine, and the Ray worker's id."""
    from fabric_ray import runtime

    try:
        name = runtime.engine().config.name
        assert directory().lookup(name).id == runtime.engine().id
        return name, ray.get_runtime_context().get_worker_id()
    finally:
        runtime.shutdown()


def test_default_names_are_of_one_process_in_the_cluster(cluster: list[str]) -> None:
    """Process ids are not: each container has a process 1."""
    task: Any = ray.remote(num_cpus=0)(_own_name)
    for name, worker in (_own_name(), ray.get(task.remote())):
        assert name == f"worker-{worker}"


TWO_CLUSTERS = """
import ray
from fabric_ray import runtime

def join():
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    engine = runtime.engine(name="driver")
    assert runtime.engine() is engine
    assert runtime.directory().lookup("driver").id == engine.id
    assert engine.config.token == runtime.cluster_token()
    ray.shutdown()
    return engine

first = join()
assert not first.closed
second = join()
assert first.closed
print("joined both")
"""


BEFORE_RAY = """
import ray
from fabric_ray import runtime
from fabric_ray.errors import InvalidArgument

def join():
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

early = runtime.engine(name="early", token=b"of every process here")
assert runtime.engine(name="early") is early
join()
assert runtime.engine() is early
assert runtime.directory().lookup("early").id == early.id
runtime.shutdown()
assert runtime.directory().entries() == []
ray.shutdown()

lonely = runtime.engine()
join()
try:
    runtime.engine()
    raise AssertionError("no engine of the cluster can reach it")
except InvalidArgument as error:
    assert "before ray.init()" in str(error), error
runtime.shutdown()
engine = runtime.engine()
assert runtime.directory().lookup(engine.config.name).id == engine.id
print("found")
"""


@pytest.mark.long
@pytest.mark.parametrize(("program", "end"), [(TWO_CLUSTERS, "joined both"), (BEFORE_RAY, "found")])
def test_a_process_that_joins_a_cluster_has_an_engine_of_that_one(program: str, end: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "FABRIC_RAY_TOKEN")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{end}\n")
