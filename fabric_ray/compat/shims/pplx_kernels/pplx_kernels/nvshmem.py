"""``pplx_kernels.nvshmem``."""

from fabric_ray.compat.nvshmem import PyTorchStreamWrapper, nvshmem_init

__all__ = ["PyTorchStreamWrapper", "nvshmem_init"]
