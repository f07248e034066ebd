"""Transformers that bear Hugging Face's names: what trainers of a weight push hold.

This package imports no torch; its modules ``transformer``, ``checkpoint``, ``boxes``, ``fsdp`` and
``tensor_parallel`` do.
"""

from fabric_ray.models.config import (
    Latent,
    Linear,
    Llama3Scaling,
    ModelConfig,
    Moe,
    Rope,
    Yarn,
    parameter_dtype,
    parameter_shapes,
)
from fabric_ray.models.demo import demo_config
from fabric_ray.models.errors import CheckpointError, InvalidConfig, ModelError, UnsupportedModel
from fabric_ray.models.hf import config_from_hf, config_to_hf, read_config
from fabric_ray.models.kinds import COMPUTED, KINDS, Kind

__all__ = [
    "COMPUTED",
    "KINDS",
    "CheckpointError",
    "InvalidConfig",
    "Kind",
    "Latent",
    "Linear",
    "Llama3Scaling",
    "ModelConfig",
    "ModelError",
    "Moe",
    "Rope",
    "UnsupportedModel",
    "Yarn",
    "config_from_hf",
    "config_to_hf",
    "demo_config",
    "parameter_dtype",
    "parameter_shapes",
    "read_config",
]
