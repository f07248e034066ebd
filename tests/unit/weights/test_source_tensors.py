"""What of a module is pushed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.source_tensors import SourceTensors
from tests.unit.plan.fake_group import as_rank


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


@pytest.mark.parametrize("in_module", [False, True])
def test_rs_1_a_plain_tensor_that_took_the_place_of_a_shard_is_pushed_or_refused(
    open_engine: Callable[..., TransferEngine], in_module: bool
) -> None:
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        shard = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        tensors = torch.nn.ParameterDict() if in_module else dict[str, torch.Tensor]()
        tensors["w"] = shard
        held = SourceTensors(tensors, open_engine())
        held.remember_layouts()
        held.region("w")
        # FSDP shows whole parameters in a module, of the same shape, and nothing in a mapping.
        tensors["w"] = torch.full((5 if in_module else 4, 4), 2.0)
        with pytest.raises(InvalidArgument, match="`w` differs from the plan"):
            held.refresh_moved()
        held.close()
