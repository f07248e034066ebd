"""Ray Direct Transport with tensors in GPU memory: one GPU, actors that share it, a driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", minversion="2.60")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = [1, 4097, 64 << 20]


@pytest.fixture(scope="module")
def holders() -> Iterator[list[Any]]:
    """Two actors on the one GPU."""
    import fabric_ray

    fabric_ray.register()
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        from tests.gpu.rdt_holder import Holder

        actors = [Holder.remote() for _ in range(2)]
        ray.get([actor.ready.remote() for actor in actors])
        yield actors
    finally:
        ray.shutdown()


def until(found: Callable[[], bool]) -> bool:
    """Whether it comes true: Ray frees objects in the background."""
    end = time.monotonic() + 60
    while not found() and time.monotonic() < end:
        time.sleep(0.02)
    return found()


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_argument_brings_a_tensor_from_gpu_to_gpu(holders: list[Any], nbytes: int) -> None:
    a, b = holders
    assert ray.get(b.holds.remote(a.make.remote(5, nbytes), 5, nbytes)) == (True, "cuda")


def test_what_another_stream_has_yet_to_write_is_waited_for(holders: list[Any]) -> None:
    a, b = holders
    nbytes = 1 << 20
    assert ray.get(b.holds.remote(a.make_late.remote(6, nbytes), 6, nbytes)) == (True, "cuda")


@pytest.mark.parametrize("registered", [False, True])
def test_a_get_brings_it_into_given_gpu_memory(holders: list[Any], registered: bool) -> None:
    from ray.experimental import set_target_for_ref

    from fabric_ray.runtime import rdt
    from tests.gpu.rdt_holder import GPU, pattern

    nbytes = 64 << 20
    target = torch.zeros(nbytes, dtype=torch.uint8, device=GPU)
    if registered:
        rdt.register_memory(target)
    try:
        for seed in range(3):
            ref = holders[0].make.remote(seed, nbytes)
            set_target_for_ref(ref, [target])
            start = time.perf_counter()
            assert ray.get(ref) is target
            print(
                f"    {nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s, its making included"
            )
            assert torch.equal(target, pattern(seed, nbytes, GPU))
    finally:
        if registered:
            rdt.deregister_memory(target)


def test_one_object_has_tensors_in_gpu_and_in_host_memory(holders: list[Any]) -> None:
    from tests.gpu.rdt_holder import mixed, same

    a, b = holders
    ref = a.make_mixed.remote(7, 100_003)
    assert ray.get(b.holds_mixed.remote(ref, 7, 100_003))
    assert same(ray.get(ref), mixed(7, 100_003))
    put = ray.put(mixed(8, 100_003), _tensor_transport="fabric")
    assert ray.get([each.holds_mixed.remote(put, 8, 100_003) for each in holders]) == [True, True]


def test_many_are_fetched_at_once(holders: list[Any]) -> None:
    from tests.gpu.rdt_holder import GPU, pattern

    nbytes = 1 << 20
    refs = [ray.put(pattern(20 + i, nbytes, GPU), _tensor_transport="fabric") for i in range(16)]
    assert all(ray.get(holders[0].fetch.remote(refs, 20, nbytes)))


def test_mr_1_gpu_memory_is_free_when_the_last_reference_goes(holders: list[Any]) -> None:
    a, b = holders
    nbytes = 64 << 20
    assert until(lambda: ray.get(a.held.remote())[1] == 0)
    before, theirs = ray.get([a.held.remote(), b.held.remote()])
    ref = a.make.remote(9, nbytes)
    assert ray.get(b.holds.remote(ref, 9, nbytes)) == (True, "cuda")
    allocated, objects, _ = ray.get(a.held.remote())
    assert allocated >= before[0] + nbytes
    assert objects == 1
    del ref
    assert until(lambda: ray.get(a.held.remote()) == before)
    # The reader's copy goes with its argument.
    assert until(lambda: ray.get(b.held.remote())[0] == theirs[0])
