"""The casts that give trainers' tensors the dtypes of the rollouts, and advice on them."""

from __future__ import annotations

import glob
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from fabric_ray.errors import FabricError
from fabric_ray.plan import Side
from fabric_ray.plan.errors import DtypeMismatch
from fabric_ray.plan.types import leaves
from fabric_ray.weights.quant import Cast, Format, Formats
from fabric_ray.weights.quant.formats import FLOATS, fits
from fabric_ray.weights.sides import converted

# An error with more patterns is of no help.
_MOST_PATTERNS = 16

Dtypes = Mapping[str, Set[str]]
"""The dtypes of each tensor, by its name."""


def found_casts(source: Side, needed: Side) -> Formats:
    """The casts between float32 and bfloat16 that give all tensors the rollouts' dtypes.

    Empty where none are needed, or where they don't do. Casts to float16 may overflow, so users
    have to ask for them.
    """
    wanted, held = _dtypes(needed), _dtypes(source)
    differ = {name: wanted[name] for name in wanted if held.get(name, wanted[name]) != wanted[name]}
    dtypes = {name: wanted[name] | held[name] for name in differ}
    if any(not found <= {"float32", "bfloat16"} for found in dtypes.values()):
        return {}
    missing = wanted.keys() - held.keys()
    for casts in _casts(differ, wanted) if differ else ():
        if _resolves(casts, source, needed, wanted, missing):
            return casts
    return {}


def with_cast(error: DtypeMismatch, source: Side, needed: Side, formats: Formats) -> DtypeMismatch:
    """The error, with formats that resolve all mismatches of dtype, if casts resolve them.

    Args:
        source: the trainers' side, before conversion.
        needed: the rollouts' side.
        formats: what WeightSync was given. The advice completes it.
    """
    advice = _advice(source, needed, formats)
    if advice is None:
        return error
    text = f"{error}, or have trainers cast it: WeightSync(formats={{{advice}}}), with Cast from "
    text += "fabric_ray.weights.quant"
    text += " and the formats that WeightSync has now" if formats else ""
    return DtypeMismatch(text, tensor=error.tensor, container=error.container, rank=error.rank)


def _advice(source: Side, needed: Side, formats: Formats) -> str | None:
    """The entries of formats under which all tensors have the rollouts' dtypes."""
    wanted, sent = _dtypes(needed), _dtypes(converted(source, needed, formats))
    missing = wanted.keys() - sent.keys()
    differ = {name: wanted[name] for name in wanted if sent.get(name, wanted[name]) != wanted[name]}
    for casts in _casts(differ, wanted):
        entries = _entries(casts)
        # The first pattern that fits counts. A repeated key has its first place and last value.
        again = _entries({p: cast for p, cast in casts.items() if p in formats})
        first = f"{entries}, **formats" + (f", {again}" if again else "")
        options: dict[str, dict[str, Format]] = {
            f"**formats, {entries}": {**formats, **casts},
            first: {**casts, **formats, **casts},
        }
        for text, completed in options.items():
            if _resolves(completed, source, needed, wanted, missing):
                return text if formats else entries
    return None


def _entries(casts: Mapping[str, Cast]) -> str:
    return ", ".join(f'{json.dumps(p)}: Cast("{cast.dtype}")' for p, cast in casts.items())


def _resolves(
    formats: Formats, source: Side, needed: Side, wanted: Dtypes, missing: Set[str]
) -> bool:
    try:
        sent = _dtypes(converted(source, needed, formats))
    except FabricError:
        return False
    same = all(sent.get(name, dtypes) == dtypes for name, dtypes in wanted.items())
    return same and wanted.keys() - sent.keys() <= missing


def _casts(differ: Dtypes, wanted: Dtypes) -> Iterator[dict[str, Cast]]:
    """Casts that may do, the shortest first."""
    by_dtype: dict[str, Cast] = {dtype: Cast(dtype) for dtype in FLOATS}
    if any(len(dtypes) > 1 or not dtypes <= by_dtype.keys() for dtypes in differ.values()):
        return
    casts = {name: by_dtype[dtype] for name, [dtype] in differ.items()}
    if len(set(casts.values())) == 1:
        yield {"*": next(iter(casts.values()))}
    if by_pattern := _by_pattern(casts, wanted):
        yield by_pattern


def _by_pattern(casts: Mapping[str, Cast], wanted: Dtypes) -> dict[str, Cast]:
    """The casts by patterns that fit no tensor of another wanted dtype; none if they are many."""
    found: dict[str, Cast] = {}
    unfit: set[tuple[str, Cast]] = set()
    for name, cast in casts.items():
        if any(fits(pattern, name) for pattern in found):
            continue
        for pattern in _patterns(name):
            if (pattern, cast) in unfit:
                continue
            if all(d == {cast.dtype} for n, d in wanted.items() if fits(pattern, n)):
                found[pattern] = cast
                break
            unfit.add((pattern, cast))
        if len(found) > _MOST_PATTERNS:
            return {}
    return found


def _patterns(name: str) -> Iterator[str]:
    """Patterns for a name, from its last part to all of it; numbers of layers and experts are
    left open except in the last."""
    escaped = [glob.escape(part) for part in name.split(".")]
    parts = ["*" if part.isdecimal() else part for part in escaped]
    for first in range(len(parts) - 1, 0, -1):
        yield "*." + ".".join(parts[first:])
    yield ".".join(parts)
    yield ".".join(escaped)


def _dtypes(side: Side) -> Dtypes:
    found: dict[str, set[str]] = defaultdict(set)
    for container in side.containers:
        for leaf in leaves(container.layout):
            found[leaf.tensor.name].add(leaf.tensor.dtype.name)
    return dict(found)
