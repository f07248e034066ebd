"""CUDA kernels, compiled where they run: sources, NVRTC, a cache on disk, and launches.

Nothing here needs a GPU, NVRTC or torch to be imported.
"""

from fabric_ray.kernels.cache import Cache, Compiled
from fabric_ray.kernels.channel import Channel, Waited, Words
from fabric_ray.kernels.driver import Device, current_architecture, mappable
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.moe import MoeKernels
from fabric_ray.kernels.moe_tables import Chunk, MoeSizes, Placement, Routing
from fabric_ray.kernels.nvrtc import Nvrtc
from fabric_ray.kernels.sources import ARCHITECTURES, Source, source, sources
from fabric_ray.kernels.steps import Steps

__all__ = [
    "ARCHITECTURES",
    "Cache",
    "Channel",
    "Chunk",
    "Compiled",
    "Device",
    "Launcher",
    "MoeKernels",
    "MoeSizes",
    "Nvrtc",
    "Placement",
    "Routing",
    "Source",
    "Steps",
    "Waited",
    "Words",
    "current_architecture",
    "mappable",
    "source",
    "sources",
]
