"""A model's weights, for all ranks of an engine: read from a checkpoint, or made from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.spec import ITEMSIZE, CacheDType
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import Checkpoint
from fabric_ray.models.config import ModelConfig, check_computed, parameter_shapes
from fabric_ray.models.stored import PlainTensors
from fabric_ray.models.transformer import Transformer
from fabric_ray.weights.families import target_containers

_FORMAT = "fabric-ray-torch/2"
"""Changes with what an engine computes from the same weights."""

_READ_BYTES = 1 << 22


class Model:
    """Weights that are ready to compute with.

    Args:
        module: the model.
        tp: tensor-parallel ranks.
        dtype: of weights and activations.
        revision: names the weights: equal for equal weights, whatever ``tp`` is.
    """

    def __init__(self, module: Transformer, *, tp: int, dtype: CacheDType, revision: str) -> None:
        self.module = module
        self.config = module.config
        self.tp = tp
        self.dtype = dtype
        self.revision = revision

    @property
    def fingerprint(self) -> str:
        """Configuration, weights and precision in one short text."""
        said = (_FORMAT, self.revision, self.dtype, msgspec.json.encode(self.config).decode())
        digest = hashlib.blake2b("\n".join(said).encode(), digest_size=16).hexdigest()
        return f"{self.config.kind}/{self.dtype}/{digest}"

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int = 0,
        tp: int = 1,
        dtype: CacheDType | None = None,
        std: float | None = None,
    ) -> Model:
        """Random weights, the same on every machine and for every ``tp``.

        Args:
            config: the model.
            seed: of all weights.
            tp: tensor-parallel ranks.
            dtype: the configuration's by default.
            std: standard deviation; ``hidden ** -0.5`` by default, so that what a model says
                depends on all it was told.

        Raises:
            UnsupportedModel: models of this kind can't be computed.
            FamilyError: ``tp`` ranks can't share the model.
        """
        std = config.hidden**-0.5 if std is None else std
        full = InitialWeights(config, seed=seed, std=std)
        return cls.of(config, full, tp=tp, dtype=dtype, revision=f"random/{seed}/{std!r}")

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        tp: int = 1,
        dtype: CacheDType | None = None,
        revision: str | None = None,
    ) -> Model:
        """Weights of a Hugging Face directory: ``config.json`` and safetensors.

        Args:
            directory: where they are.
            tp: tensor-parallel ranks.
            dtype: that of the checkpoint by default.
            revision: names the weights; a digest of the files by default, for which they are read
                whole once.

        Raises:
            ModelError: one of its subclasses: the checkpoint is damaged or can't be computed.
            FamilyError: ``tp`` ranks can't share the model.
        """
        checkpoint = Checkpoint(directory)
        check_computed(checkpoint.config)
        revision = _digest(checkpoint.directory) if revision is None else revision
        return cls.of(checkpoint.config, checkpoint, tp=tp, dtype=dtype, revision=revision)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        full: Mapping[str, Tensor],
        *,
        revision: str,
        tp: int = 1,
        dtype: CacheDType | None = None,
    ) -> Model:
        """Weights from full tensors by their Hugging Face names.

        Raises:
            UnsupportedModel: models of this kind can't be computed.
            CheckpointError: a tensor isn't of plain floats, or something stored with one, such as
                its scale, would be ignored.
            FamilyError: ``tp`` ranks can't share the model.
        """
        check_computed(config)
        dtype = config.dtype if dtype is None else dtype
        if dtype not in ITEMSIZE:
            raise InferenceError(
                f"dtype {dtype!r} isn't computed; use one of {', '.join(ITEMSIZE)}"
            )
        target_containers(config, tp=tp, rank=0)  # refuses what can't be shared evenly
        wanted: torch.dtype = getattr(torch, dtype)
        names = parameter_shapes(config)
        plain = PlainTensors(full, names, "the model's weights")
        with torch.device("meta"):
            module = Transformer(config).requires_grad_(False)
        held = {name: plain[name].to(wanted, copy=True) for name in names}
        module.load_state_dict(held, assign=True)
        return cls(module, tp=tp, dtype=dtype, revision=revision)


def _digest(directory: Path) -> str:
    """Of all weights' files, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    return f"files/{digest.hexdigest()}"
