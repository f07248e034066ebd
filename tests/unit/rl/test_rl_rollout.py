"""A rollout draws while versions arrive, and no batch with two of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

from fabric_ray import TransferEngine, runtime
from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl import policy
from fabric_ray.demo.rl.actors import Rollout
from fabric_ray.demo.rl.outcome import model
from fabric_ray.errors import FabricError
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.weights import WeightSource, WeightSync
from tests.unit.weights.local_sync import InProcess

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    with TransferEngine(name="rollout", transport="shm") as engine:
        monkeypatch.setattr(runtime, "engine", lambda **_: engine)
        made = Rollout(0, Options(rollouts=1, prompts=2, group=2))
        yield made
        made.target.close()


@pytest.fixture
def tensors() -> Tensors:
    return dict(InitialWeights(model(), seed=5, std=0.1))


@pytest.fixture
def sync(rollout: Rollout, tensors: Tensors) -> Iterator[WeightSync]:
    with TransferEngine(name="trainer", transport="shm") as engine:
        source = WeightSource(tensors, rank=0, engine=engine)
        yield WeightSync(["default"], ["default"], digest=True, calls=InProcess())
        source.close()


def test_nothing_is_drawn_before_the_first_version(rollout: Rollout) -> None:
    with pytest.raises(FabricError, match="no version has arrived"):
        rollout.draw()


def test_a_version_that_arrives_while_a_batch_is_drawn_serves_the_next(
    rollout: Rollout, sync: WeightSync, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync.push()
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    half_way, go_on = threading.Event(), threading.Event()
    whole = policy.sample

    def slow(*args: Any, **named: Any) -> Any:
        half_way.set()
        assert go_on.wait(20)
        assert rollout.check(first if rollout.target.version == 1 else tensors).wrong == ()
        return whole(*args, **named)

    monkeypatch.setattr(policy, "sample", slow)
    with ThreadPoolExecutor(2) as pool:
        drawn = pool.submit(rollout.draw)
        assert half_way.wait(20)
        for tensor in tensors.values():
            tensor.mul_(0.5)
        pushed = pool.submit(sync.push)
        assert not wait([pushed], timeout=0.5).done  # it waits for the batch
        assert rollout.target.version == 1
        go_on.set()
        assert drawn.result(20).version == 1
        assert pushed.result(20).version == 2
    assert rollout.draw().version == 2
    served = rollout.served(first)
    assert len(served.wrong) > 1
    assert served.generating
    assert rollout.served(tensors, tensors).wrong == ()
