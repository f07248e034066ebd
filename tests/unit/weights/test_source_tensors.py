"""What of a module is pushed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fabric_ray import TransferEngine
from fabric_ray.weights.source_tensors import SourceTensors


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8))
        self.register_buffer("e_score_correction_bias", torch.zeros(4))
        self.register_buffer("inverse_frequencies", torch.zeros(2), persistent=False)


def test_of_a_module_that_is_pushed_which_a_checkpoint_would_have(
    open_engine: Callable[..., TransferEngine],
) -> None:
    model = torch.nn.ModuleDict({"gate": Router()})
    held = SourceTensors(model, open_engine())
    assert list(held.tensors) == ["gate.weight", "gate.e_score_correction_bias"]
    model["gate"].e_score_correction_bias = torch.ones(4)
    held.refresh()
    assert held.local("gate.e_score_correction_bias").tolist() == [1.0] * 4
    held.close()
