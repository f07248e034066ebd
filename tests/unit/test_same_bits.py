"""How the demo of weight pushes compares tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ray")

from fabric_ray.demo.actors import same_bits


def test_every_bit_of_a_tensor_is_compared() -> None:
    nan = torch.tensor([torch.nan, 0.0])
    assert same_bits(nan, nan.clone())
    for other in (torch.tensor([torch.nan, -0.0]), nan.view(2, 1), nan.view(torch.int32)):
        assert not same_bits(nan, other)
