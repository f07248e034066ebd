"""How inference engines lay out known models, in the words of :mod:`fabric_ray.plan`."""

from fabric_ray.weights.families.derived import post_load
from fabric_ray.weights.families.errors import (
    FamilyError,
    IncompleteFamily,
    Indivisible,
    InvalidRanks,
    UnknownFamily,
)
from fabric_ray.weights.families.rules import (
    Derived,
    Family,
    Part,
    Rule,
    Split,
    Vocab,
    Whole,
)
from fabric_ray.weights.families.source import source_side
from fabric_ray.weights.families.tables import FAMILIES, family_of
from fabric_ray.weights.families.target import ContainerSpec, target_containers, target_side

__all__ = [
    "FAMILIES",
    "ContainerSpec",
    "Derived",
    "Family",
    "FamilyError",
    "IncompleteFamily",
    "Indivisible",
    "InvalidRanks",
    "Part",
    "Rule",
    "Split",
    "UnknownFamily",
    "Vocab",
    "Whole",
    "family_of",
    "post_load",
    "source_side",
    "target_containers",
    "target_side",
]
