"""What may still write to tensors is over before their bytes are read."""

from __future__ import annotations

import pytest
import torch

from fabric_ray.tensors import wait_for_kernels


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_of_any_gpu_in_use_to_pinned_memory_are_waited_for(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    # Synchronizing a GPU that the process doesn't use would make a context there.
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda i: i != 1, raising=False)
    wait_for_kernels(iter([torch.zeros(1)]))
    assert sorted(d.index for d in waited) == ([0, 2] if pinned else [])
