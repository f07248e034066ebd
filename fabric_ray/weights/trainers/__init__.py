"""How trainers that don't describe themselves by DTensors lay out known models."""

from fabric_ray.weights.trainers.megatron import local_tensors, megatron_side
from fabric_ray.weights.trainers.ranks import Parallel
from fabric_ray.weights.trainers.tables import megatron_family

__all__ = ["Parallel", "local_tensors", "megatron_family", "megatron_side"]
