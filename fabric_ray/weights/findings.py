"""What a connection found out by looking at both ends, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fabric_ray.plan import ParamMeta, Side
from fabric_ray.plan.leaving import several, tensor_names
from fabric_ray.plan.types import Leaf, leaves

Findings = Mapping[str, Sequence[str]]
"""Names of tensors or containers, by what happens to them at each push."""


def findings(reports: Sequence[Any], source: Side, sent: Side, left: Sequence[str]) -> Findings:
    """What is cast, merged, tied, made of experts, and left behind.

    Args:
        reports: of the trainers; those that aren't lists of :class:`ParamMeta` say nothing.
        source: the trainers' side.
        sent: the same after conversion.
        left: what stays behind.
    """
    found: dict[str, dict[str, None]] = defaultdict(dict)
    held = set(tensor_names(source)) | {container.name for container in source.containers}
    metas = (meta for report in reports if isinstance(report, list) for meta in report)
    for meta in metas:
        _add(found, meta, held)
    dtypes = {
        leaf.tensor.name: leaf.tensor.dtype for c in source.containers for leaf in leaves(c.layout)
    }
    for container in sent.containers:
        for leaf in leaves(container.layout):
            before, after = dtypes.get(leaf.tensor.name), leaf.tensor.dtype
            if before is not None and before != after:
                found[f"converted from {before.name} to {after.name} by its trainers"][
                    leaf.tensor.name
                ] = None
    for container in source.containers:
        if not isinstance(container.layout, Leaf):
            found["sent as the tensors that it is made of"][container.name] = None
    for name in left:
        found["not sent, since no rollout needs it (leave)"][name] = None
    return {what: tuple(names) for what, names in found.items()}


def in_words(found: Findings, name: str | None = None) -> str:
    """A line for each finding, or for those about one tensor or container."""
    lines = []
    for what, names in found.items():
        if name is None:
            lines.append(f"{len(names)} {what}: {several(names)}")
        elif name in names:
            lines.append(f"`{name}` is {what}")
    return "\n".join(lines)


def _add(found: dict[str, dict[str, None]], meta: ParamMeta, held: set[str]) -> None:
    if meta.adapters:
        adapters = ", ".join(f"`{adapter}`" for adapter in meta.adapters)
        found[f"sent with the adapters {adapters} added"][meta.name] = None
    if meta.name not in held:
        found["not sent, since it is tied to a tensor that is"][meta.name] = None
