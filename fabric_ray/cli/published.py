"""Pushes whose times others have published."""

from __future__ import annotations

from typing import NamedTuple

from fabric_ray.cli import words
from fabric_ray.weights.forecast import Push

PAPER = "fabric-lib, Table 5"
MILES = "miles with SGLang, H100 hosts"
RDT = "vLLM's article on sharded_rdt, H100 hosts"
RDT_PULL = "vLLM pull request 43375, H100 hosts"
NEMO = "NeMo-RL pull request 2971, H100 hosts"


class Published(NamedTuple):
    """One push, in the words of the command line."""

    model: str
    trainer: str
    rollout: str
    dtype: str
    milliseconds: dict[str, float]
    """By the means by which it was made."""
    source: str


_FSDP = "fsdp=16,pp=2,ep=8"
# Model, Megatron trainers, rollouts, dtype, and milliseconds by RDMA and by NCCL.
_MILES = """
glm-z1-9b tp=2,cp=2,etp=1,dp=2 tp=4,engines=2 bfloat16 707.1 694.6
moonlight-16b-a3b tp=2,ep=8,etp=1,dp=4 tp=8,ep=8 bfloat16 1073.3 1482.0
glm-4.7-flash tp=4,ep=8,etp=1,dp=2 tp=4,ep=4,engines=2 bfloat16 4229.0 2508.6
qwen3-30b-a3b tp=4,ep=8,etp=1,dp=4 tp=8,ep=8,engines=2 bfloat16 2160.2 2670.0
glm-4.5-air pp=4,ep=8,etp=1,dp=8 tp=8,ep=8,engines=4 bfloat16 2637.2 5001.1
qwen3-235b-a22b tp=4,pp=4,cp=2,ep=16,etp=1,dp=2 tp=32,ep=32,engines=2 bfloat16 3162.0 10753.6
glm-5 tp=4,pp=8,cp=2,ep=16,etp=1,dp=2 tp=64,ep=64,engines=2 bfloat16 8479.7 58301.5
kimi-k2 tp=8,pp=8,cp=4,ep=32,etp=1 tp=32,ep=32,engines=8 fp8:64x64 7227.3 53279.1
"""

# Trainers, rollouts, and milliseconds of the fastest and the slowest refit.
_NEMO = """
tp=2,ep=4,etp=1,dp=8 tp=4,engines=4 1130 1530
tp=2,pp=2,ep=4,etp=1,dp=4 tp=4,engines=4 740 1170
pp=2,ep=8,etp=1,dp=8 tp=2,engines=8 1210 1520
pp=2,ep=8,etp=1,dp=8 tp=8,engines=2 740 1000
tp=2,cp=2,ep=8,etp=1,dp=4 tp=4,engines=4 1020 1450
tp=2,ep=4,etp=1,dp=8 tp=4,ep=4,engines=4 1000 1600
"""


def _times(rdma: str, nccl: str) -> dict[str, float]:
    return {"RDMA": float(rdma), "NCCL": float(nccl)}


PUBLISHED = (
    Published("kimi-k2", _FSDP, "tp=1,dp=32,ep=32,engines=4", "fp8:128x128", {"RDMA": 1233}, PAPER),
    *(
        Published(row[0], f"megatron:{row[1]}", row[2], row[3], _times(row[4], row[5]), MILES)
        for row in map(str.split, _MILES.strip().splitlines())
    ),
    Published(
        "qwen3-235b-a22b",
        "megatron:tp=4,pp=2,ep=8,etp=1,dp=2",
        "tp=1,dp=16,ep=16",
        "bfloat16",
        {"NIXL": 3490, "NCCL": 64720},
        RDT,
    ),
    Published(
        "qwen3-235b-a22b",
        "fsdp=8",
        "tp=1,dp=8,ep=8",
        "bfloat16",
        {"NIXL, fastest": 3200, "slowest": 3300},
        RDT_PULL,
    ),
    Published(
        "kimi-k2",
        "megatron:tp=8,pp=8,ep=32,etp=1,dp=4",
        "tp=32,ep=32,engines=4",
        "bfloat16",
        {"NIXL": 7530},
        RDT,
    ),
    *(
        Published(
            "qwen3-30b-a3b",
            f"megatron:{row[0]}",
            row[1],
            "bfloat16",
            {"NCCL, fastest": float(row[2]), "slowest": float(row[3])},
            NEMO,
        )
        for row in map(str.split, _NEMO.strip().splitlines())
    ),
)
"""The paper gives no table for its other models, only 1.2 to 2 s for DeepSeek-V3 and Qwen3-235B."""


def published(push: Push) -> Published | None:
    """What was published of this very push."""
    for row in PUBLISHED:
        config = words.model(row.model)
        sides = words.trainers(row.trainer), words.rollouts(row.rollout)
        if push == Push(config, *sides, words.formats(row.dtype, config)):
            return row
    return None
