"""``nixl._utils`` over fabric-ray."""

from fabric_ray.compat.nixl.utils import ba_buf, free_passthru, malloc_passthru, verify_transfer

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]
