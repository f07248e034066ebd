"""Memory of the driver's, where a GPU is short of it or a graph is captured; the driver is one that
knows which calls a capture forbids."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fabric_ray.errors import ResourceError
from fabric_ray.kernels import driver

RELAXED, OUT_OF_MEMORY, CAPTURE_UNSUPPORTED = 2, 2, 900


class Driver:
    """What is called of libcuda while a stream is captured."""

    def __init__(self) -> None:
        self.mode, self.room, self.taken = 0, True, 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuMemAlloc_v2(self, address: Any, nbytes: ctypes.c_size_t) -> int:
        if self.mode != RELAXED:
            return CAPTURE_UNSUPPORTED
        if not self.room:
            return OUT_OF_MEMORY
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
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return fake


def test_memory_comes_and_goes_while_a_graph_is_captured(cuda: Driver) -> None:
    memory = driver._Allocation(512, 0)
    assert (cuda.taken, cuda.mode) == (512, 0)
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
    assert cuda.taken == 512
    del memory
