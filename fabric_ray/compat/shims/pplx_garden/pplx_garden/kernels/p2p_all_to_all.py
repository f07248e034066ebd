"""``pplx_garden.kernels.p2p_all_to_all``."""

from fabric_ray.moe.pplx_garden import P2PAllToAll

__all__ = ["P2PAllToAll"]
