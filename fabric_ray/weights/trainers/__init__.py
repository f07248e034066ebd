"""How trainers that don't describe themselves by DTensors lay out known models."""

from fabric_ray.weights.trainers.fsdp import FsdpParallel, even_stages, fsdp_side
from fabric_ray.weights.trainers.megatron import local_tensors, megatron_side
from fabric_ray.weights.trainers.ranks import Parallel
from fabric_ray.weights.trainers.tables import megatron_family
from fabric_ray.weights.trainers.torchtitan import torchtitan_parts

__all__ = [
    "FsdpParallel",
    "Parallel",
    "even_stages",
    "fsdp_side",
    "local_tensors",
    "megatron_family",
    "megatron_side",
    "torchtitan_parts",
]
