"""Expert parallelism: tokens to the ranks of their experts and back."""

from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.throughput import ThroughputAllToAll, Traffic
from fabric_ray.moe.tokens import Dispatched, RankLoss, RowPart

__all__ = ["AllToAll", "Dispatched", "RankLoss", "RowPart", "ThroughputAllToAll", "Traffic"]
