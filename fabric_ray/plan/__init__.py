"""One reshard algebra for weights and KV: source layout and target layout in, copies out.

:func:`plan` is a pure function of two :class:`Side` values. It knows no addresses and does no I/O.
"""

from fabric_ray.plan.copies import Copies, Copy, Loop, Row
from fabric_ray.plan.errors import (
    BufferMismatch,
    DtypeMismatch,
    ExtraTensors,
    InconsistentReports,
    InvalidLayout,
    MissingTensors,
    OverlappingElements,
    PartialPlacement,
    PlanDecodeError,
    PlanError,
    PlanTooLarge,
    ShapeMismatch,
    Uncovered,
    UnknownRank,
)
from fabric_ray.plan.execute import apply
from fabric_ray.plan.planner import Balance, Link, LocalContainer, Plan, plan
from fabric_ray.plan.replicas import first_replicas, replica_groups
from fabric_ray.plan.report import ParamMeta, side_from_param_meta
from fabric_ray.plan.types import (
    Concat,
    Container,
    DType,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Partial,
    Placement,
    Replicate,
    Shard,
    Side,
    Stack,
    StridedShard,
    Tensor,
)

__all__ = [
    "Balance",
    "BufferMismatch",
    "Concat",
    "Container",
    "Copies",
    "Copy",
    "DType",
    "DtypeMismatch",
    "ExtraTensors",
    "InconsistentReports",
    "InvalidLayout",
    "Layout",
    "Leaf",
    "Link",
    "LocalContainer",
    "Loop",
    "Mesh",
    "MissingTensors",
    "OverlappingElements",
    "Pad",
    "ParamMeta",
    "Partial",
    "PartialPlacement",
    "Placement",
    "Plan",
    "PlanDecodeError",
    "PlanError",
    "PlanTooLarge",
    "Replicate",
    "Row",
    "ShapeMismatch",
    "Shard",
    "Side",
    "Stack",
    "StridedShard",
    "Tensor",
    "Uncovered",
    "UnknownRank",
    "apply",
    "first_replicas",
    "plan",
    "replica_groups",
    "side_from_param_meta",
]
