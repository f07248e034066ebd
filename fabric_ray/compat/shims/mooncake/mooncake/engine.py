"""``mooncake.engine`` over fabric-ray."""

from fabric_ray.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
