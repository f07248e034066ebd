"""What a trainer gathers of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.replica.gathering import Gathering
from tests.on_device import on_device, on_wait
from tests.unit.plan.fake_group import as_rank


@pytest.mark.parametrize("from_the_first", [True, False])
def test_rs_1_while_fsdp_shows_whole_parameters_their_shards_are_gathered(
    from_the_first: bool,
) -> None:
    with as_rank(0, 1):
        module: Any = torch.nn.Linear(4, 3, bias=False)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        shards = module.weight
        if from_the_first:
            module.unshard()
        gathering = Gathering(module, {}, 0)
        gathering.whole()
        for step in (1, 2):
            module.unshard()
            with torch.no_grad():
                shards._local_tensor.fill_(step)
            assert not torch.equal(module.weight, torch.full((3, 4), step)), "shown: the old one"
            ((name, whole),) = gathering
            assert name == "weight"
            assert torch.equal(whole, torch.full((3, 4), float(step)))


@pytest.mark.parametrize("by", [None, torch.zeros(5, 4)], ids=["nothing", "another shape"])
def test_rs_1_a_shard_that_its_module_replaced_is_not_gathered(by: torch.Tensor | None) -> None:
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        module: Any = torch.nn.ParameterDict()
        for name in ("a", "b"):
            shard = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
            module[name] = shard
        gathering = Gathering(module, {}, 0)
        assert len(dict(gathering)) == 2
        del module["b"]
        if by is not None:
            module["b"] = by
        with pytest.raises(InvalidArgument, match=r"`b`.*gather the same at every push"):
            list(gathering)


def test_rs_1_kernels_that_write_a_parameter_end_before_it_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = torch.zeros(3)
    gathering = Gathering({"w": on_device(held)}, {}, 0)
    gathering.whole()
    on_wait(monkeypatch, lambda: held.numpy().fill(2))
    ((_, whole),) = gathering
    assert whole.tolist() == [2, 2, 2]


def test_rs_1_a_trainer_whose_tensor_is_refused_gathers_to_the_end_with_the_others() -> None:
    asked: list[str] = []
    rows = {"a": 2, "b": 3, "c": 4}

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, count in rows.items():
            asked.append(name)
            yield name, torch.zeros(count, 4)

    gathering = Gathering(gather, {}, 0)
    gathering.whole()
    rows["a"] = 1
    asked.clear()
    with pytest.raises(InvalidArgument, match=r"`a` \(float32 \[1, 4\]\) came"):
        list(gathering)
    assert asked == ["a", "b", "c"]
