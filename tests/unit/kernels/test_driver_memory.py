"""Memory of the driver's, where a GPU is short of it, a graph is captured or the thread has another
GPU's context; the driver is one that knows which calls a capture forbids."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fabric_ray.errors import ResourceError
from fabric_ray.kernels import driver

RELAXED, OUT_OF_MEMORY, INVALID_CONTEXT, CAPTURE_UNSUPPORTED = 2, 2, 201, 900


class Driver:
    """What is called of libcuda while a stream is captured. A context is 100 more than its GPU; a
    GPU has others than its primary one from 200 on."""

    def __init__(self) -> None:
        self.mode, self.room, self.taken = 0, True, 0
        self.current, self.retained = 100, [0, 0]
        self.contexts: list[int] = []
        """The context of each allocation."""

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained[device.value] += 1
        context._obj.value = 100 + device.value
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current or None
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = self.current % 100
        return 0 if self.current else INVALID_CONTEXT

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value or 0
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuMemAlloc_v2(self, address: Any, nbytes: ctypes.c_size_t) -> int:
        if self.mode != RELAXED:
            return CAPTURE_UNSUPPORTED
        if not self.room:
            return OUT_OF_MEMORY
        self.contexts.append(self.current)
        address._obj.value = 4096
        self.taken += nbytes.value
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        if self.mode != RELAXED or address.value != 4096:
            return CAPTURE_UNSUPPORTED
        self.taken = 0
        return 0

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = f"error {result}".encode()
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    driver._primary_context.cache_clear()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    yield fake
    driver._primary_context.cache_clear()


def test_memory_comes_and_goes_while_a_graph_is_captured(cuda: Driver) -> None:
    memory = driver._Allocation(512, 0)
    assert (cuda.taken, cuda.mode) == (2 << 20, 0)
    del memory
    assert (cuda.taken, cuda.mode) == (0, 0)


def test_memory_that_torch_keeps_for_later_is_let_go_of_first(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.room = False
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(ResourceError, match="cuMemAlloc_v2 failed: error 2"):
        driver._Allocation(512, 0)
    assert cuda.mode == 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(cuda, "room", True))
    memory = driver._Allocation(512, 0)
    assert cuda.taken == 2 << 20
    del memory


@pytest.mark.parametrize(
    ("current", "used"),
    [
        pytest.param(0, 101, id="none"),
        pytest.param(100, 101, id="another GPU's"),
        pytest.param(101, 101, id="this GPU's"),
        pytest.param(201, 201, id="a green context of this GPU"),
    ],
)
def test_memory_is_taken_in_a_context_of_its_own_gpu(cuda: Driver, current: int, used: int) -> None:
    for _ in range(2):  # two threads
        cuda.current = current
        memory = driver._Allocation(512, 1)
        del memory
    assert cuda.contexts == [used, used]
    assert cuda.retained == [0, 1]
