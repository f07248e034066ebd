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

Uses = dict[str, list[tuple[Rule, Part]]]
"""By pattern with ``#`` for numbers: the rules that want such parameters, the first first."""


class Match(msgspec.Struct, frozen=True):
    """A container of this model, or one for each expert."""

    rule: Rule
    layer: int | None
    members: tuple[tuple[str, ...], ...]
    """Parameter names per expert (one entry if there are none), one per part."""

    @property
    def container(self) -> str:
        return filled(self.rule.container, layer=self.layer)


def match(family: Family, parameters: Collection[str]) -> tuple[Match, ...]:
    """The containers of a model, in the order in which their first parameters are given.

    Raises:
        IncompleteFamily: a parameter has no rule or two, or a container lacks a parameter.
    """
    known = frozenset(parameters)
    uses = _uses(family)
    found: dict[tuple[Rule, int | None], dict[int, dict[Part, str]]] = defaultdict(dict)
    for name in parameters:
        rule, part, numbers = _rule_for(family, uses, name, known)
        expert = numbers.get("expert", 0)
        found[rule, numbers.get("layer")].setdefault(expert, {})[part] = name
    return tuple(
        Match(rule, layer, tuple(_members(family, rule, layer, experts)))
        for (rule, layer), experts in found.items()
    )


def numbers_in(pattern: str, name: str) -> dict[str, int] | None:
    """What stands in a name for the placeholders of a pattern; ``None`` if it isn't of its form."""
    if _hashed(pattern) != _NUMBER.sub("#", name):
        return None
    found = zip(_PLACEHOLDER.findall(pattern), _NUMBER.findall(name), strict=True)
    return {key: int(number) for key, number in found}


def filled(pattern: str, **numbers: int | None) -> str:
    """A pattern with numbers for its placeholders."""
    for key, number in numbers.items():
        if number is not None:
            pattern = pattern.replace(f"{{{key}}}", str(number))
    return pattern


def _uses(family: Family) -> Uses:
    uses: Uses = {}
    for rule in family.rules:
        for part in rule.parts:
            others = uses.setdefault(_hashed(part.parameter), [])
            # A rule that needs no more than this one would always come first.
            if any(other.needs <= rule.needs for other, _ in others):
                raise IncompleteFamily(
                    f"family {family.name} uses parameter {part.parameter} twice; "
                    "take it out of one rule",
                    family=family.name,
                    parameter=part.parameter,
                )
            others.append((rule, part))
    return uses


def _rule_for(
    family: Family, uses: Uses, name: str, known: frozenset[str]
) -> tuple[Rule, Part, dict[str, int]]:
    """The first rule that finds all it needs, or one whose lack :func:`_members` names."""
    candidates = uses.get(_NUMBER.sub("#", name), [])
    incomplete = None
    for rule, part in candidates:
        numbers = numbers_in(part.parameter, name) or {}
        missing = [need for need in rule.needs if filled(need, **numbers) not in known]
        if not missing:
            return rule, part, numbers
        if rule.beside not in missing:
            incomplete = rule, part, numbers
    if incomplete is None:
        raise IncompleteFamily(
            f"family {family.name} has no rule for parameter {name}; add one to its table",
            family=family.name,
            parameter=name,
        )
    return incomplete


def _members(
    family: Family, rule: Rule, layer: int | None, experts: dict[int, dict[Part, str]]
) -> Iterator[tuple[str, ...]]:
    for expert in range(max(experts) + 1):
        names = experts.get(expert, {})
        for part in rule.parts:
            if part not in names:
                container = filled(rule.container, layer=layer)
                which = f" of expert {expert}" if rule.per_expert else ""
                raise IncompleteFamily(
                    f"family {family.name} builds {container} from {part.parameter}{which}, which "
                    "the model lacks; add the parameter or take it out of the rule",
                    family=family.name,
                    parameter=filled(part.parameter, layer=layer, expert=expert),
                )
        yield tuple(names[part] for part in rule.parts)


def _hashed(pattern: str) -> str:
    return _PLACEHOLDER.sub("#", pattern)
