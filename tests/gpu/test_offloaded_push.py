"""Parameters that FSDP2 keeps on the host while a GPU computes: pushed from where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fabric_ray import TransferEngine
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Format, Fp8, quantise, quantised_target
from tests.unit.weights.local_sync import InProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = {"0.weight": (128, 64), "1.weight": (32, 128)}
FORMATS: dict[str, Format] = {"*": Fp8((16, 16))}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def whole() -> Side:
    """One rollout that holds everything."""
    dtype, mesh = DType.of("float32"), Mesh.line([0])
    return Side.of(
        1,
        [
            Container(name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Replicate(),)))
            for name, shape in SHAPES.items()
        ],
    )


def step(model: nn.Module) -> None:
    """Gathers on the GPU, computes there, and has the optimizer change what lies on the host."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()


@pytest.mark.parametrize("formats", [{}, FORMATS], ids=["as they are", "fp8"])
def test_offloaded_parameters_arrive_as_the_step_left_them(
    group: None, formats: dict[str, Format]
) -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False))
    mesh = init_device_mesh("cuda", (1,))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))
    with TransferEngine(name="trainer") as ours, TransferEngine(name="rollout") as theirs:
        source = WeightSource(model, rank=0, name="trainer", engine=ours)
        side = quantised_target(whole(), formats) if formats else whole()
        target = WeightTarget(side, rank=0, name="rollout", engine=theirs)
        sync = WeightSync(["trainer"], ["rollout"], formats=formats, digest=True, calls=InProcess())
        for _ in range(3):
            step(model)
            sync.push()
            for name, parameter in model.named_parameters():
                held = parameter._local_tensor.detach()  # type: ignore[attr-defined]
                assert held.device.type == "cpu"
                values = quantise(held, FORMATS["*"])[0] if formats else held
                arrived = target.weights[name]
                assert torch.equal(arrived.view(torch.uint8), values.view(torch.uint8)), name
        source.close()
        target.close()
