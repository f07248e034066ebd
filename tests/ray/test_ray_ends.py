"""A controller whose Ray has ended raises, and starts no new Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
# In a process of its own, which is the one whose Ray ends.
PROGRAM = """
import sys

import ray
import torch

from fabric_ray import runtime
from fabric_ray.errors import WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget

W = Tensor("w", (4,), DType.of("float32"))
SIDE = Side.of(1, [Container("w", W.dtype, Leaf(W, Mesh.line([0]), (Replicate(),)))])


class Trainer:
    def __init__(self):
        runtime.engine(name="trainer")
        self.source = WeightSource({"w": torch.ones(4)}, rank=0)


class Rollout:
    def __init__(self):
        runtime.engine(name="rollout")
        self.target = WeightTarget(SIDE, rank=0)


def start():
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")


def told(call):
    try:
        call()
    except WeightSyncError as error:
        return str(error)


start()
actors = [ray.remote(num_cpus=0)(one).remote() for one in (Trainer, Rollout)]
sync = WeightSync(actors[:1], actors[1:])
print(sync.push().version)
ray.shutdown()
print(told(sync.push))
print(told(sync.connect))
print(ray.is_initialized())
start()
print(told(sync.push))
ray.shutdown()
"""


@pytest.mark.long
def test_after_ray_has_ended_a_push_says_what_to_do() -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    version, push, connect, running, other = done.stdout.splitlines()
    assert version == "1"
    assert push == connect
    assert push.startswith("ray doesn't run in this process, or not any more")
    assert "call ray.init(), then make the actors and a WeightSync of them" in push
    assert running == "False", "no cluster was started without any actors"
    assert "trainer 0: its actor can't be called" in other
    assert other.endswith("if ray was restarted, make the actors and the WeightSync anew")
