"""The console that commands print tables to."""

from __future__ import annotations

from rich.console import Console

_PIPE_COLUMNS = 160


def stdout() -> Console:
    """Standard output: as wide as its terminal, or 160 columns in a pipe or a file.

    ``COLUMNS`` in the environment sets another width, as everywhere in rich.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _PIPE_COLUMNS
    return console
