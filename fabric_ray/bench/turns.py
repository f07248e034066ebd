"""Paired turns: contenders take turns, in an order that rotates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fabric_ray.bench.record import Results
from fabric_ray.bench.results import (
    ContenderError,
    Failure,
    Family,
    RowHeader,
    make_figure,
    make_row,
)

T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A contender in one case."""

    name: str
    family: Family
    run: Callable[[], Sequence[float]]
    """One turn; seconds of an operation, one for each sample.

    Raises:
        ContenderError: it takes no more turns, and fails.
    """
    facts: Callable[[], Mapping[str, Any]] = dict
    """What else its :class:`~fabric_ray.bench.results.Figure` says, asked after the last turn."""


def rotated(contenders: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: each begins as often as any other."""
    shift = turn % max(1, len(contenders))
    return [*contenders[shift:], *contenders[:shift]]


def take_turns(
    header: RowHeader,
    entries: Iterable[Entry],
    turns: int,
    results: Results,
    *,
    failures: Iterable[Failure] = (),
    on_turn: Callable[[Entry, int], object] = lambda entry, turn: None,
    on_failure: Callable[[Entry], object] = lambda entry: None,
) -> None:
    """Measures a case. Its row is kept also when an exception ends the turns, with those it has.

    Args:
        header: the case.
        entries: who takes turns.
        turns: of each.
        results: where the row goes.
        failures: of contenders that did not come so far.
        on_turn: called before a turn, with its number from 1 on.
        on_failure: called with an entry that has failed.
    """
    taken: dict[str, list[Sequence[float]]] = {}
    left, failed = list(entries), list(failures)
    complete = False
    try:
        for turn in range(turns):
            for entry in rotated(left, turn):
                on_turn(entry, turn + 1)
                try:
                    taken.setdefault(entry.name, []).append(entry.run())
                except ContenderError as error:
                    failed.append(Failure(contender=entry.name, reason=str(error)))
                    left.remove(entry)
                    on_failure(entry)
        complete = True
    finally:
        figures = [
            make_figure(header, entry.name, entry.family, taken[entry.name], **entry.facts())
            for entry in left
            if taken.get(entry.name)
        ]
        if figures or complete:
            results.add(make_row(header, figures, failed, complete=complete))
