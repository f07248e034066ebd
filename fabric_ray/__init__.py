"""fabric-ray moves LLM state (weights, KV pages, MoE tokens) between Ray actors with one-sided
pushes and counted completion."""

import os

try:
    from fabric_ray._native import __version__
except ModuleNotFoundError as missing:
    if missing.name != "fabric_ray._native":
        raise
    raise ModuleNotFoundError(
        f"{os.path.dirname(__file__)} has no compiled core (fabric_ray._native): it is a clone's "
        "folder, which hides what is installed; run pip install -e '.[ray]' in the clone, or start "
        "Python elsewhere",
        name=missing.name,
    ) from None
from fabric_ray.engine import (
    Batch,
    Counter,
    CounterRef,
    EngineAddress,
    EngineConfig,
    Peer,
    Region,
    RegionDescriptor,
    RemoteRegion,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    Transfer,
    TransferEngine,
    pages,
)
from fabric_ray.errors import FabricError, Unsupported

__all__ = [
    "Batch",
    "Counter",
    "CounterRef",
    "EngineAddress",
    "EngineConfig",
    "FabricError",
    "Peer",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "Transfer",
    "TransferEngine",
    "__version__",
    "pages",
    "register",
]


def register() -> None:
    """Makes ``tensor_transport="fabric"`` known to Ray, in this process and in the actors that it
    creates: tensors of object references then travel through the engine.

    Call it before you create actors. It may be called any number of times, and be named as Ray's
    ``worker_process_setup_hook``. Needs the extra ``ray`` with Ray 2.60 or later.

    Raises:
        Unsupported: Ray or torch is missing, or Ray has no place for tensor transports.
        InvalidArgument: another library has taken the name.
    """
    try:
        from fabric_ray.runtime.rdt import registration
    except ImportError as cause:
        raise Unsupported(
            f"tensor transports need Ray 2.60 or later, and torch ({cause}); "
            "run: pip install 'ray>=2.60,<3' 'torch>=2.6,<3' (fabric-ray's extra [ray])"
        ) from cause
    registration.register()


# As pydantic reads the booleans of an EngineConfig, and empty.
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def _show_if_asked() -> None:
    """With ``FABRIC_RAY_OBSERVE=1`` a process shows itself from its first engine on."""
    if os.environ.get("FABRIC_RAY_OBSERVE", "").strip().lower() in _FALSE:
        return
    from fabric_ray.engine import on_open
    from fabric_ray.observe.serving import serve_quietly

    on_open(lambda _: serve_quietly())


_show_if_asked()
