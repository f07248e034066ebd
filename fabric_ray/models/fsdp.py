"""Training on CPUs with torch's fully sharded data parallelism, as trainers of a demo do it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fabric_ray.errors import InvalidArgument
from fabric_ray.models.boxes import BoxSource, load_parameters
from fabric_ray.models.config import ModelConfig
from fabric_ray.models.transformer import Transformer

if TYPE_CHECKING:
    # torch.distributed exports it, but not in its types.
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore


def serve_store(address: str, *, world: int, timeout: float = 60.0) -> TCPStore:
    """What rank 0 opens for the others to :func:`join`; the system chooses its ``port``.

    Args:
        address: of this host, as the others reach it.
        world: number of ranks.
        timeout: seconds that ranks wait for each other.
    """
    return TCPStore(
        address,
        0,
        world_size=world,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def join(
    *,
    rank: int,
    world: int,
    address: str,
    port: int,
    timeout: float = 60.0,
    store: TCPStore | None = None,
) -> None:
    """Joins the process group of all trainers (gloo); returns when all have.

    Args:
        rank: 0 to ``world - 1``.
        world: number of ranks.
        address: of the store's host.
        port: of the store.
        timeout: seconds that a collective may take.
        store: the one of :func:`serve_store`, on the rank that opened it.
    """
    limit = timedelta(seconds=timeout)
    if store is None:
        store = TCPStore(
            address, port, world_size=world, is_master=False, wait_for_workers=False, timeout=limit
        )
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)


def leave() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(*, replicas: int = 1) -> DeviceMesh:
    """All ranks in a line, or ``replicas`` lines that hold the same (HSDP).

    Raises:
        InvalidArgument: the ranks don't make that many equal lines.
    """
    world = dist.get_world_size()
    if replicas < 1 or world % replicas:
        raise InvalidArgument(
            f"{world} ranks can't make {replicas} equal replicas; give a divisor of {world}"
        )
    if replicas == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    shape = (replicas, world // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded_model(config: ModelConfig, mesh: DeviceMesh, source: BoxSource) -> Transformer:
    """The model, each block and the rest sharded over ``mesh``, filled from ``source``.

    No rank ever holds more than its shards and one box of ``source``.
    """
    with torch.device("meta"):
        model = Transformer(config)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_parameters(model, source)
    return model


def make_optimizer(model: Transformer, *, lr: float = 0.1) -> torch.optim.Optimizer:
    """Plain gradient descent: no state beside the parameters."""
    return torch.optim.SGD(model.parameters(), lr=lr, foreach=False)


def train_step(model: Transformer, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """One step of next-token prediction; returns this rank's loss before the step.

    Args:
        model: sharded or not.
        optimizer: of the model's parameters.
        batch: this rank's token ids ``[batch, positions]``, int64; at least two positions.
    """
    optimizer.zero_grad(set_to_none=True)
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    return loss.item()


def copy_task(vocab: int, *, batch: int, half: int, generator: torch.Generator) -> Tensor:
    """Random token ids, each row followed by itself: ``[batch, 2 * half]``, int64."""
    first = torch.randint(
        vocab, (batch, half), generator=generator, dtype=torch.int64, device="cpu"
    )
    return torch.cat([first, first], dim=1)


@torch.no_grad()
def full_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, one by one, on every rank; all ranks must iterate to the end."""
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
