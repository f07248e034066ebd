"""The console that commands print tables to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PIPE_COLUMNS = 1000


def stdout() -> Console:
    """Standard output: as wide as its terminal. In a pipe or a file rows and sentences stay whole.

    ``COLUMNS`` in the environment sets another width, as everywhere in rich.
    """
    # ``:ab:`` in the address of a device is no emoji.
    console = Console(emoji=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _PIPE_COLUMNS
    return console


def plain(*columns: str, title: str | None = None) -> Table:
    """A table without lines. Columns that begin with ``>`` are figures; they and those that begin
    with ``|`` are never broken."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        name, whole = column.lstrip(">|"), column.startswith((">", "|"))
        right = column.startswith(">")
        table.add_column(name, overflow="fold", no_wrap=whole, justify="right" if right else "left")
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names in bold, and what each is."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def ranges(numbers: tuple[int, ...]) -> Iterator[str]:
    """Runs of ascending numbers: ``0-3``, ``8``."""
    if not numbers:
        return
    first = last = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == last + 1:
            last = number
            continue
        yield f"{first}-{last}" if last > first else f"{first}"
        if number is not None:
            first = last = number
