"""``deep_ep.utils``: events, and what UCCL-EP's has beside them."""

from typing import Any

from fabric_ray.moe.deepep import EventHandle, EventOverlap


def initialize_uccl(*_: Any, **__: Any) -> tuple[list[Any], None]:
    """No proxies and no workers: the engine has its own."""
    return [], None


def destroy_uccl(proxies: Any, workers: Any) -> None:
    """Nothing."""


def check_nvlink_connections(group: Any) -> None:
    """Nothing: the engine finds what ranks share."""


__all__ = [
    "EventHandle",
    "EventOverlap",
    "check_nvlink_connections",
    "destroy_uccl",
    "initialize_uccl",
]
