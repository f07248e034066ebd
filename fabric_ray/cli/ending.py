"""How every command ends: one table of exit codes, and errors as one sentence on stderr."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from fabric_ray.errors import FabricError

# Typer has a Click of its own, or another's, by its version; of either it names only BadParameter.
_UsageError: Any = typer.BadParameter.__base__

# How Click ends what it says where it has something to offer.
_OFFERED = re.compile(r"[.?]?\s+(Did you mean|Choose from)\b(.*?)\??$")


class Code(IntEnum):
    """Exit codes; ``docs/cli.md`` tells users."""

    DONE = 0
    NO = 1
    """It ran, and the answer is no: something doesn't work, a check failed, nothing is there."""
    IMPOSSIBLE = 2
    """It can't be done as asked; one sentence on stderr says why."""
    INTERRUPTED = 130
    """Ctrl-C, while there was more to do."""
    TERMINATED = 143
    """SIGTERM, in a command that has files or processes to remove first."""
    UNREAD = 141
    """The reader of stdout closed it, as ``head`` does; what a shell says of SIGPIPE."""


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


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end what is within as Ctrl-C does, so that it removes its files and processes,
    and then the command, with :attr:`Code.TERMINATED`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = False

    def interrupt(*_: Any) -> None:
        nonlocal received
        received = True
        # Ray passes on this exception alone.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise typer.Exit(Code.TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


# What a write to a file on a full disk ends with.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Commands(TyperGroup):
    """All commands: what is typed wrongly ends as everything else does that can't be done."""

    def main(self, *args: Any, **extra: Any) -> Any:
        # Who started it may have closed them: what is printed there goes nowhere.
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # The locale's encoding may lack a character of a path or a table.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **extra)
        except SystemExit as end:
            # Rich and Click turn a closed pipe into 1, which means "no" here.
            if isinstance(end.__context__, BrokenPipeError):
                raise SystemExit(Code.UNREAD) from None
            raise
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            typer.echo(f"fabric-ray: stdout can't be written: {error.strerror}", err=True)
            # Python would write the rest when it exits, and end with a code of its own.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
            raise SystemExit(Code.IMPOSSIBLE) from None

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        path = f"{parent.command_path} {info_name}" if parent else info_name or "fabric-ray"
        with _usage_in_words(lambda: path):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        # Reads the command's own words, too.
        with _usage_in_words(lambda: f"{ctx.command_path} {ctx.invoked_subcommand or ''}".strip()):
            return super().invoke(ctx)


@contextmanager
def _usage_in_words(reads: Callable[[], str]) -> Iterator[None]:
    """``reads`` names the command whose words are read: not every error knows its own."""
    try:
        yield
    except _UsageError as error:
        # Who types nothing gets the help, which newer versions raise.
        if error.ctx and error.message == error.ctx.get_help():
            raise
        path = error.ctx.command_path if error.ctx else reads()
        fail(f"{_one_sentence(error.format_message())}; see {path} --help")


def _one_sentence(said: str) -> str:
    """``No such command 'a'.  Did you mean 'b'?`` as errors are said here; what users typed stays
    as it is."""
    said = re.sub(r"\s*\n\s*", " ", said.strip()).removesuffix(".")
    said = _OFFERED.sub(lambda found: f"; {found[1].lower()}{found[2]}", said)
    return said[:1].lower() + said[1:]
