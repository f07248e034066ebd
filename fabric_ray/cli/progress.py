"""Progress on stderr, at a terminal; stdout is for the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done and for how long; gone when it is over.

    Yields what changes the words.
    """
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda words: bar.update(task, description=words)
