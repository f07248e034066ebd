"""Source tensors that no target container needs: refused, unless they are named to stay behind."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan.errors import ExtraTensors
from fabric_ray.plan.types import Side, leaves

_SHOWN = 3
_MOST_PATTERNS = 8
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|adapters?)\.")
_DRAFT = re.compile(r"(^|[._])(mtp|draft|eagle\d?|medusa|nextn)([._]|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_tokens)\.weight$")
_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def check_patterns(leave: object) -> tuple[str, ...]:
    """The patterns, if they are a sequence of strings.

    Raises:
        InvalidArgument: they aren't.
    """
    if isinstance(leave, str) or not isinstance(leave, Sequence):
        raise InvalidArgument(
            f"leave is {leave!r}, expected a tuple of patterns of tensor names; give "
            'leave=("draft.*",), or leave=() to refuse every tensor that has no container'
        )
    if odd := [pattern for pattern in leave if not isinstance(pattern, str) or not pattern]:
        raise InvalidArgument(f"leave names {odd[0]!r}, expected a pattern such as 'draft.*'")
    return tuple(leave)


def left_behind(
    held: Iterable[str], needed: Collection[str], leave: Sequence[str]
) -> tuple[str, ...]:
    """The tensors that stay behind at every push, in order (RS-1: by name, never by accident).

    Args:
        held: names of the source's tensors.
        needed: names of those that the target needs.
        leave: patterns of names that may stay behind, with ``*``, ``?`` and ``[...]``.

    Raises:
        ExtraTensors: no pattern names a tensor that isn't needed.
        InvalidArgument: a pattern names none, or one that is needed.
    """
    names = dict.fromkeys(held)
    extra = [name for name in names if name not in needed]
    left: set[str] = set()
    for pattern in leave:
        matches = re.compile(fnmatch.translate(pattern)).match
        if wanted := [name for name in names if name in needed and matches(name)]:
            raise InvalidArgument(
                f"leave={pattern!r} names {several(wanted)}, which the target needs; narrow the "
                "pattern"
            )
        found = [name for name in extra if matches(name)]
        if not found:
            raise InvalidArgument(
                f"leave={pattern!r} names none of the source's {len(names)} tensors; correct the "
                "pattern or remove it"
            )
        left.update(found)
    stale = [name for name in extra if name not in left]
    if stale:
        raise ExtraTensors(
            f"no target container needs {several(stale)} of the source: what is trained there "
            f"would never reach the target; {_advice(stale, needed)}",
            tensor=stale[0],
        )
    return tuple(name for name in extra if name in left)


def tensor_names(side: Side) -> Iterator[str]:
    """Of all tensors that a side's containers are made of."""
    return (leaf.tensor.name for c in side.containers for leaf in leaves(c.layout))


def _advice(stale: Sequence[str], needed: Collection[str]) -> str:
    layers = max((int(n) for name in needed for n in _LAYER.findall(name)), default=None)
    advice = []
    if any(map(_ADAPTER.search, stale)):
        advice.append("give WeightSource the PEFT module itself, which merges its adapters")
    if any(_is_draft(name, layers) for name in stale):
        advice.append("add containers for draft (MTP) layers to the target side")
    if any(_HEAD.search(name) for name in stale):
        advice.append("make the target of a configuration that doesn't tie the head")
    if not advice:
        advice.append("add containers for them to the target side")
    patterns, others = _patterns(stale, needed)
    quoted = "".join(f'"{pattern}", ' for pattern in patterns)
    tuple_ = f"({quoted.rstrip() if len(patterns) == 1 else quoted.removesuffix(', ')})"
    more = f" and patterns for {others} more" if others else ""
    return f"{', '.join(advice)}, or name what may become stale: leave={tuple_}{more}"


def _patterns(stale: Sequence[str], needed: Collection[str]) -> tuple[list[str], int]:
    """Patterns that name all stale tensors, and none that the target needs; and the number of
    tensors that are left after the last pattern that fits in an error."""
    used = {prefix for name in needed for prefix in _prefixes(_without_numbers(name))}
    used |= {prefix for name in needed for prefix in _prefixes(name)}
    patterns: list[str] = []
    rest = list(stale)
    while rest and len(patterns) < _MOST_PATTERNS:
        name = rest[0]
        exact = glob.escape(name)
        for prefix in (*_prefixes(_without_numbers(name)), *_prefixes(name)):
            # A `*` that stands for a number also matches names with more components.
            matches = re.compile(fnmatch.translate(_pattern(prefix))).match
            if prefix not in used and not any(map(matches, needed)):
                left = [other for other in rest if not matches(other)]
                break
        else:
            prefix, left = "", rest[1:]
        alone = len(rest) - len(left) == 1
        patterns.append(exact if alone else _pattern(prefix))
        rest = left
    return patterns, len(rest)


def _pattern(prefix: str) -> str:
    """The pattern of names that begin with these components, or of a whole name."""
    escaped = ".".join(part if part == "*" else glob.escape(part) for part in prefix.split("."))
    return f"{escaped}*" if prefix.endswith(".") else escaped


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _prefixes(name: str) -> list[str]:
    """The beginnings of a name in whole components, each with its dot, the shortest first, then
    the name."""
    parts = name.split(".")
    return [".".join([*parts[:count], ""]) for count in range(1, len(parts))] + [name]


def _is_draft(name: str, layers: int | None) -> bool:
    """By its name, or since it lies in a layer after the target's last."""
    beyond = layers is not None and any(int(n) > layers for n in _LAYER.findall(name))
    return beyond or _DRAFT.search(name) is not None


def several(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
