"""``hybrid_ep_cpp``, by which callers of ``HybridEPBuffer`` see that DeepEP has it."""

from typing import Any

from fabric_ray.compat import refuse_installed

refuse_installed("hybrid_ep_cpp", __file__)

from fabric_ray.moe.comm import comm_of, ranks_per_node  # noqa: E402


class ExtendedMemoryAllocator:
    """Asked for the ranks of a node before there is a buffer."""

    def detect_accessible_ranks(self, group: Any) -> int:
        """Ranks of each node, by the hosts' names; all ranks of the group call it together."""
        return ranks_per_node(comm_of(group))


__all__ = ["ExtendedMemoryAllocator"]
