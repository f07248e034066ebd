"""A stand-in for tensors in the memory of a GPU, where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    """Host memory that says that it is a GPU's."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def on_wait(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Calls ``call`` where all kernels of the GPU are waited for."""

    def synchronize(device: torch.device) -> None:
        assert device == DEVICE
        call()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
