"""What the model of an exchange knows of machines, each figure with its source."""

from __future__ import annotations

import msgspec

#: Threads of a block, and blocks of a launch on each multiprocessor: half of the two that fit
#: (``fabric_ray/kernels/steps.py``).
THREADS, BLOCKS = 256, 1
#: Loads of 16 bytes that a thread has on its way: steps that move or sum rows, and workers of high
#: throughput that pack tokens; steps that pack, and workers that take tokens to their rows.
#: ``tests/unit/kernels/test_kernel_compiler.py`` reads the first in the machine code.
MOVE_LOADS, PACK_LOADS = 8, 2
#: Terms of a sum that a worker has on their way.
TERMS_AHEAD = 4


class Gpu(msgspec.Struct, frozen=True):
    """A GPU; peak figures of its data sheet."""

    name: str
    sms: int
    hbm_gbps: float
    """GB/s of memory."""
    nvlink_gbps: float
    """GB/s in one direction."""
    ghz: float


GPUS = (
    Gpu("H100", sms=132, hbm_gbps=3350, nvlink_gbps=450, ghz=1.755),
    Gpu("A100", sms=108, hbm_gbps=2039, nvlink_gbps=300, ghz=1.41),
)


class Cost(msgspec.Struct, frozen=True):
    """A figure that no run of this code has measured on a GPU: from a good to a bad case."""

    best: float
    worst: float
    source: str


ASSUMED = "assumed; no measurement was found"
_LATENCIES = "GH200: https://github.com/markdewing/AI_kernels/blob/main/latency/README.md"
_PAPER = "https://arxiv.org/abs/2510.27656"
_LEGACY = "https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md"
_UCCL = "https://github.com/uccl-project/uccl/blob/main/ep/README.md"

#: Microseconds, but for cycles and shares where the name says so.
COSTS = {
    "launch": Cost(2.0, 4.0, ASSUMED),
    # An addition and a poll that sees it, each a way to L2 and back, and naps of 32 ns.
    "meet": Cost(0.8, 2.0, f"four to eight ways to L2; {_LATENCIES}"),
    "l1 cycles": Cost(40, 40, _LATENCIES),
    "l2 cycles": Cost(281, 400, f"{_LATENCIES}; the worst: under load, assumed"),
    "hbm cycles": Cost(690, 1100, f"{_LATENCIES}; the worst: under load, assumed"),
    "word": Cost(
        1.0, 2.5, f"a way over the bus and back; half of it is 2 to 5 us in {_PAPER} §7.1"
    ),
    "tell": Cost(1.5, 3.0, "two fences and three ways to L2, then one way over the bus; assumed"),
    "peer fence": Cost(1.0, 2.0, ASSUMED),
    "host": Cost(0.5, 2.0, "a command taken and its effects computed; docs/benchmarks.md, Posting"),
    "post": Cost(
        0.13, 0.48, f"a write: 8.5 us for 64 in {_PAPER} Table 9; ours, docs/benchmarks.md"
    ),
    "shm": Cost(0.46, 2.0, "8 bytes to a polling receiver, docs/benchmarks.md; the worst: assumed"),
    "copy call": Cost(1.5, 3.0, f"cuMemcpyAsync; {ASSUMED}"),
    "copy": Cost(2.0, 6.0, f"from that call to the first byte, and its end noticed; {ASSUMED}"),
    "nic": Cost(2.0, 4.0, "one way; 2 us is what benchmarks/moe/ranks.py simulates; assumed"),
    "nic share": Cost(0.97, 0.80, f"40 of 50 GB/s is what DeepEP reaches at EP256, {_LEGACY}"),
    "nvlink share": Cost(0.80, 0.70, f"160 of 200 GB/s in {_LEGACY}; 320 of 450 in {_UCCL}"),
    "hbm share": Cost(0.92, 0.80, ASSUMED),
    "scan cycles": Cost(3, 8, "a step of the loop over a tile's 256 routes; assumed"),
}


class Machine(msgspec.Struct, frozen=True):
    """A GPU, and where in each range its figures are: 0 is best, 1 is worst."""

    gpu: Gpu
    at: float
    nic_gbps: float = 50.0
    """GB/s of a rank's NICs."""
    per_node: int = 8

    def cost(self, name: str) -> float:
        """A figure of :data:`COSTS`; cycles as microseconds."""
        cost = COSTS[name]
        value = cost.best + self.at * (cost.worst - cost.best)
        return value / self.gpu.ghz / 1e3 if name.endswith(" cycles") else value

    @property
    def hbm(self) -> float:
        """Bytes per microsecond, as are those below."""
        return self.gpu.hbm_gbps * self.cost("hbm share") * 1e3

    @property
    def nvlink(self) -> float:
        return self.gpu.nvlink_gbps * self.cost("nvlink share") * 1e3

    @property
    def nic(self) -> float:
        return self.nic_gbps * self.cost("nic share") * 1e3

    def stream(self, nbytes: float, loads: int) -> float:
        """Microseconds to read so many bytes with all blocks of a launch, by Little's law: bytes on
        their way against the time that each takes."""
        latency = self.cost("hbm cycles")
        in_flight = self.gpu.sms * BLOCKS * THREADS * loads * 16
        return latency + nbytes / min(self.hbm, in_flight / latency)


class Published(msgspec.Struct, frozen=True):
    """What others measured of an exchange, microseconds."""

    who: str
    case: str
    dispatch: float
    combine: float
    where: str


_GARDEN = "https://github.com/perplexityai/pplx-garden/blob/main/docs/fabric-lib.md"
_NIXL_HT = "https://github.com/ai-dynamo/nixl/pull/1341"


def _rows(who: str, where: str, times: dict[str, tuple[float, float]]) -> tuple[Published, ...]:
    return tuple(Published(who, case, *both, where) for case, both in times.items())


PUBLISHED = (
    *_rows("DeepEP", _LEGACY, {
        "ll 8": (77, 114), "ll 16": (118, 195), "ll 32": (155, 273), "ll 64": (173, 314),
    }),
    *_rows("fabric-lib", _GARDEN, {
        "ll 8": (50.5, 65.3), "ll 16": (110.2, 185.5), "ll 32": (153.9, 266.3),
        "ll 64": (187.5, 309.1),
    }),
    *_rows("DeepEP by fabric-lib", _GARDEN, {
        "ll 8": (42.6, 72.0), "ll 16": (123.9, 203.0), "ll 32": (159.1, 285.0),
        "ll 64": (177.9, 325.0),
    }),
    *_rows("UCCL-EP on MI300X", _UCCL, {
        "ll 8": (65, 92), "ll 16": (136, 207), "ll 32": (224, 341),
    }),
    *_rows("UCCL-EP on EFA", _UCCL, {
        "ll 16": (226, 293), "ll 32": (465, 694), "normal 8": (500, 973), "nodes 16": (1196, 6379),
    }),
    # The dispatch alone is published.
    *_rows("NIXL-EP", "https://github.com/ai-dynamo/nixl/pull/1749", {
        "ll 8": (74.8, float("nan")),
    }),
    *_rows("NIXL-EP", _NIXL_HT, {"nodes 16": (864, 1908)}),
    *_rows("DeepEP by NIXL-EP", _NIXL_HT, {"nodes 16": (806, 1823)}),
)  # fmt: skip
