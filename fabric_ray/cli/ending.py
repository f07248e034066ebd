"""How every command ends: one table of exit codes, and errors as one sentence on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

import typer

from fabric_ray.errors import FabricError


class Code(IntEnum):
    """Exit codes; ``docs/cli.md`` tells users."""

    DONE = 0
    NO = 1
    """It ran, and the answer is no: something doesn't work, a check failed, nothing is there."""
    IMPOSSIBLE = 2
    """It can't be done as asked; one sentence on stderr says why."""
    INTERRUPTED = 130
    """Ctrl-C, while there was more to do."""


def fail(message: str, code: Code = Code.IMPOSSIBLE) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    typer.echo(f"fabric-ray: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Ends the command where what is within can't be done, and says why.

    What isn't a :class:`FabricError` is a fault of ours, and shown as one.
    """
    try:
        yield
    except FabricError as error:
        fail(str(error))
