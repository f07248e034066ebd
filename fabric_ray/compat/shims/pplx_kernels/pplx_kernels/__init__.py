"""pplx-kernels over fabric-ray. It doesn't take the place of an installed one."""

from fabric_ray.compat import refuse_installed

refuse_installed("pplx_kernels", __file__)

from fabric_ray.compat.nvshmem import nvshmem_init  # noqa: E402
from fabric_ray.moe.pplx import AllToAll  # noqa: E402

__all__ = ["AllToAll", "nvshmem_init"]
