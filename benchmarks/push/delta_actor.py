"""A trainer or a rollout that pushes the same tensors by changes, whole, and as is chosen."""

from __future__ import annotations

import resource
import sys
from multiprocessing.connection import Client
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.models import ModelConfig, parameter_shapes
from fabric_ray.weights import WeightSource, WeightTarget
from fabric_ray.weights.families import target_side

NAMES: dict[str, Any] = {"whole": False, "changes": "always", "chosen": True}
"""What is pushed, and the ``delta`` that does so."""
_state: dict[str, Any] = {}


def config(layers: int) -> ModelConfig:
    """A model of about 140 MB a layer."""
    sizes = {"vocab": 32_000, "hidden": 2048, "intermediate": 8192}
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 64}
    return ModelConfig(kind="llama", layers=layers, **sizes, **heads)


def train(_: Any, share: float, step: int) -> None:
    """Changes about this share of all elements, here and there, in their lowest bit."""
    generator = torch.Generator().manual_seed(step)
    for tensor in _state["tensors"].values():
        bits = tensor.view(-1).view(torch.int16)
        if share >= 1:
            bits.bitwise_xor_(1)
        elif count := int(bits.numel() * share):
            at = torch.randint(bits.numel(), (count,), generator=generator)
            bits[at] = bits[at] ^ 1


def spent(_: Any) -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def differ(_: Any) -> list[str]:
    """Tensors of which targets hold different bytes."""
    one, *others = (target.weights for target in _state["targets"])
    return [name for name in one if any(not _is_same(one[name], o[name]) for o in others)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def main() -> None:
    """``socket role address layers token``: serves calls until the other end is closed."""
    path, role, address, layers, token = sys.argv[1:]
    torch.set_num_threads(1)
    engine = TransferEngine(name=role, transport="tcp", token=token, bind=(address,))
    model = config(int(layers))
    if role == "trainer":
        torch.manual_seed(0)
        shapes = parameter_shapes(model).items()
        _state["tensors"] = {n: torch.randn(s, dtype=torch.bfloat16) for n, s in shapes}
        _state["sources"] = [
            WeightSource(_state["tensors"], rank=0, name=name, engine=engine) for name in NAMES
        ]
    else:
        side = target_side(model, tp=1)
        _state["targets"] = [WeightTarget(side, rank=0, name=name, engine=engine) for name in NAMES]
    with Client(path, "AF_UNIX") as controller:
        controller.send(role)
        while True:
            try:
                function, args = controller.recv()
            except EOFError:
                return
            try:
                controller.send((function(None, *args), None))
            except Exception as error:
                controller.send((None, error))
