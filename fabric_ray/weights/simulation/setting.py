"""What a simulated push depends on, beside model and layouts."""

from __future__ import annotations

import msgspec

from fabric_ray.errors import InvalidArgument

STAGES = ("h2d", "gather", "fuse", "quantise", "submit", "write")
"""What time goes to: copies to the GPU, ``full_tensor()``, fusing, quantising; the processor that
posts requests; the wire."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one call, or of one request.

    The defaults are what fabric-lib measured of Kimi-K2 (Table 5; requests: Table 9, 8.5 us for
    the 56 peers of EP64 on ConnectX-7).
    """

    h2d: float = 378e-6
    """From the host's memory to the GPU's; 0 where weights are on the GPU."""
    gather: float = 532e-6
    """One ``full_tensor()``."""
    gathers: float = 974 / 487
    """How many of them a tensor takes."""
    fuse: float = 37e-6
    """Into what the engine keeps as one; only what was gathered is fused before it is sent."""
    quantise: float = 137e-6
    submit: float = 23e-6
    """A call that submits what a step has for a rollout."""
    request: float = 0.15e-6
    """Each work request of it."""


PER_CALL = ("h2d", "gather", "fuse", "quantise", "submit", "request")
"""The costs that are times."""


# At a lower rate the time of a large push would pass what the virtual clock counts.
_SLOWEST_GBPS, _FASTEST_GBPS = 1e-3, 1e6
_LONGEST_S = 3600.0
# The largest work request of the simulated NICs.
_LARGEST_PAGE = 1 << 30


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """NICs, the same at every rank."""

    nics: int = 1
    """Of each rank, 1 to 4."""
    gbps: float = 400.0
    """Of each NIC, each way."""
    latency: float = 2e-6
    """Seconds of every delivery, one way."""
    page: int = 4 << 20
    """What a step has for a rollout is sent as pages of at most so many bytes: the smallest thing
    that is simulated by itself."""

    def __post_init__(self) -> None:
        if not 1 <= self.nics <= 4:
            raise InvalidArgument(f"nics: got {self.nics}, expected 1 to 4 for each rank")
        for name, value, least, most, unit in (
            ("gbps", self.gbps, _SLOWEST_GBPS, _FASTEST_GBPS, "Gb/s"),
            ("latency", self.latency, 0, _LONGEST_S, "seconds"),
            ("page", self.page, 1, _LARGEST_PAGE, "bytes"),
        ):
            if not least <= value <= most:
                raise InvalidArgument(f"{name}: got {value:g}, expected {least:g} to {most} {unit}")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    cluster: Cluster = Cluster()
    costs: Costs = Costs()
    watermark: int | None = None
    """Bytes of a trainer's temporary memory; by default 256 MiB, or its largest tensor."""
    gather: bool = False
    """Whole tensors are gathered before they are sent (fabric-lib, section 5.2), one mesh group
    after the other; else each rank sends what it holds."""

    def __post_init__(self) -> None:
        if self.watermark is not None and self.watermark < 1:
            raise InvalidArgument(
                f"watermark: got {self.watermark} bytes, expected 1 or more; leave it out for the "
                "default"
            )
