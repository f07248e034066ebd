"""Finds a family's containers in a model's parameters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator

import msgspec

from fabric_ray.weights.families.errors import IncompleteFamily
from fabric_ray.weights.families.rules import Family, Part, Rule

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACEHOLDER = re.compile(r"\{(layer|expert)\}")


class Match(msgspec.Struct, frozen=True):
    """A container of this model."""

    container: str
    rule: Rule
    members: tuple[tuple[str, ...], ...]
    """Parameter names per expert (one entry if the rule isn't stacked), one per part."""


def match(family: Family, parameters: Collection[str]) -> tuple[Match, ...]:
    """The containers of a model, in the order in which their first parameters are given.

    Raises:
        IncompleteFamily: a parameter has no rule or two, or a container lacks a parameter.
    """
    rules = _by_pattern(family)
    found: dict[tuple[Rule, str], dict[int, dict[Part, str]]] = defaultdict(dict)
    for name in parameters:
        pattern = _NUMBER.sub("#", name)
        if pattern not in rules:
            raise IncompleteFamily(
                f"family {family.name} has no rule for parameter {name}; add one to its table",
                family=family.name,
                parameter=name,
            )
        rule, part = rules[pattern]
        numbers = _numbers(part.parameter, name)
        container = rule.container.replace("{layer}", numbers.get("layer", ""))
        expert = int(numbers.get("expert", 0))
        found[rule, container].setdefault(expert, {})[part] = name
    return tuple(
        Match(container, rule, tuple(_members(family, rule, container, experts)))
        for (rule, container), experts in found.items()
    )


def _by_pattern(family: Family) -> dict[str, tuple[Rule, Part]]:
    rules: dict[str, tuple[Rule, Part]] = {}
    for rule in family.rules:
        for part in rule.parts:
            pattern = _PLACEHOLDER.sub("#", part.parameter)
            if pattern in rules:
                raise IncompleteFamily(
                    f"family {family.name} uses parameter {part.parameter} twice; "
                    "take it out of one rule",
                    family=family.name,
                    parameter=part.parameter,
                )
            rules[pattern] = rule, part
    return rules


def _numbers(pattern: str, name: str) -> dict[str, str]:
    return dict(zip(_PLACEHOLDER.findall(pattern), _NUMBER.findall(name), strict=True))


def _members(
    family: Family, rule: Rule, container: str, experts: dict[int, dict[Part, str]]
) -> Iterator[tuple[str, ...]]:
    for expert in range(max(experts) + 1):
        names = experts.get(expert, {})
        for part in rule.parts:
            if part not in names:
                which = f" of expert {expert}" if rule.stacked else ""
                raise IncompleteFamily(
                    f"family {family.name} builds {container} from {part.parameter}{which}, which "
                    "the model lacks; add the parameter or take it out of the rule",
                    family=family.name,
                    parameter=part.parameter.replace("{expert}", str(expert)),
                )
        yield tuple(names[part] for part in rule.parts)
