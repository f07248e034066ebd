"""A rollout of the demo: holds a tensor-parallel share of the model, as an engine lays it out."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from fabric_ray import runtime
from fabric_ray.demo.options import Checked
from fabric_ray.models import ModelConfig
from fabric_ray.models.checkpoint import Checkpoint
from fabric_ray.weights import WeightTarget
from fabric_ray.weights.families import target_side
from fabric_ray.weights.reference import iter_expected


class Rollout:
    """One rank; make it with ``ray.remote(Rollout).remote(...)``.

    Args:
        rank: 0 to ``tp - 1``.
        tp: number of rollouts.
        ep: groups of them that own whole experts.
        config: the model.
        transport: of the engine.
        staged: see :class:`fabric_ray.weights.WeightTarget`.
    """

    def __init__(
        self, rank: int, tp: int, ep: int, config: ModelConfig, *, transport: str, staged: bool
    ) -> None:
        torch.set_num_threads(1)
        self.rank, self.tp, self.ep, self.config = rank, tp, ep, config
        engine = runtime.engine(name=f"demo-rollout-{rank}", transport=transport)
        side = target_side(config, tp=tp, ep=ep)
        self.target = WeightTarget(side, rank=rank, engine=engine, staged=staged)
        self._seen: int | None = None

    def check(self, reference: Path) -> Checked:
        """Compares every byte with what the checkpoint of the trainers' tensors says."""
        with self.target.reading() as weights:
            return self._check(dict(weights), reference)

    def _check(self, held: dict[str, torch.Tensor], reference: Path) -> Checked:
        whole = Checkpoint(reference)
        nbytes, checksum = 0, 0
        wrong = []
        expected = iter_expected(self.config, whole, tp=self.tp, ep=self.ep, rank=self.rank)
        for name, tensor in expected:
            found = held.pop(name, None)
            if found is None or not _same(found, tensor):
                wrong.append(name)
                continue
            nbytes += found.nbytes
            checksum = zlib.crc32(_bytes(found).numpy().data, checksum)
        changed, self._seen = checksum != self._seen, checksum
        return Checked(nbytes, (*wrong, *held), changed)

    def close(self) -> None:
        self.target.close()
        runtime.shutdown()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, so that a NaN equals itself and zeros of either sign differ.
    return tensor.contiguous().view(-1).view(torch.uint8)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and torch.equal(_bytes(found), _bytes(expected))
    )
