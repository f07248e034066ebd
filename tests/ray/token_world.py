"""A program of its own: two actors of a cluster that Ray guards by a token write to each other."""

from __future__ import annotations

import logging
from typing import Any

import ray

from fabric_ray import CounterRef, RegionDescriptor, runtime
from fabric_ray.runtime import cluster_token, ray_token

NBYTES = 64


class End:
    """An actor with the engine of its process, which takes the cluster's token."""

    def __init__(self) -> None:
        self._engine = runtime.engine()
        self._region = self._engine.alloc(NBYTES)
        self._counter = self._engine.counter()

    def offer(self) -> tuple[RegionDescriptor, CounterRef, bytes]:
        return self._region.descriptor(), self._counter.ref, cluster_token()

    def push(self, there: RegionDescriptor, counter: CounterRef) -> None:
        self._region.numpy()[:] = 7
        remote = self._engine.import_region(there)
        self._engine.write(self._region, remote, imm=counter).wait(30)

    def came(self) -> int:
        self._counter.wait(1, timeout=30)
        return int(self._region.numpy().sum())


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
    ends: list[Any] = [ray.remote(num_cpus=0)(End).remote() for _ in range(2)]
    there, counter, token = ray.get(ends[1].offer.remote())
    assert token == ray_token() == cluster_token()
    ray.get(ends[0].push.remote(there, counter))
    assert ray.get(ends[1].came.remote()) == 7 * NBYTES
    print("arrived")


if __name__ == "__main__":
    main()
