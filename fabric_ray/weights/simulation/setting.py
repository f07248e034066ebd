"""What a simulated push depends on, beside model and layouts."""

from __future__ import annotations

import math

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
            raise InvalidArgument(f"{self.nics} NICs: an engine drives 1 to 4 for each rank")
        rate = 0 < self.gbps < math.inf
        if not (rate and 0 <= self.latency <= _LONGEST_S and 1 <= self.page <= _LARGEST_PAGE):
            raise InvalidArgument(
                f"NICs of {self.gbps} Gb/s with {self.latency} s of latency and pages of "
                f"{self.page} bytes: give a rate above 0, a latency from 0 to {_LONGEST_S:g} s, "
                f"and pages of 1 to {_LARGEST_PAGE} bytes"
            )


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
                f"a watermark of {self.watermark} bytes: give 1 or more, or none for the default"
            )
