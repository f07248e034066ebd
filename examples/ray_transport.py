"""Weights that go from a trainer to two rollouts by reference, into memory that is there.

python examples/ray_transport.py
"""

from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref

import fabric_ray
from fabric_ray.runtime import rdt

N = 1 << 20


class Trainer:
    def __init__(self) -> None:
        fabric_ray.register()
        self.weights = rdt.empty(N, torch.float32)  # processes of this host map it
        rdt.register_memory(self.weights)

    def step(self) -> list[Any]:
        self.weights += 1
        return [ray.put(self.weights, _tensor_transport="fabric")]


class Rollout:
    def __init__(self) -> None:
        fabric_ray.register()
        self.weights = torch.zeros(N)
        rdt.register_memory(self.weights)

    def pull(self, refs: list[Any]) -> float:
        set_target_for_ref(refs[0], [self.weights])
        ray.get(refs[0])
        return float(self.weights.mean())


def main() -> None:
    fabric_ray.register()
    ray.init()
    actor: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)
    trainer, rollouts = actor(Trainer).remote(), [actor(Rollout).remote() for _ in range(2)]
    for step in (1, 2, 3):
        refs = ray.get(trainer.step.remote())
        assert ray.get([rollout.pull.remote(refs) for rollout in rollouts]) == [step, step]
    print(f"3 steps of {4 * N} bytes arrived at 2 rollouts")
    ray.shutdown()


if __name__ == "__main__":
    main()
