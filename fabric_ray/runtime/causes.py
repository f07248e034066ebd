"""What an actor failed of, in one line, from what Ray raises where it was called."""

from __future__ import annotations

from typing import Any

# Ray explains the end of a process at length.
_LENGTH = 400


def cause_of(error: BaseException) -> str:
    """The class and message of what an actor raised, or why its process ended.

    What its ``__init__`` raised reaches callers as the end of a printed traceback alone.
    """
    from ray.exceptions import ActorDiedError, RayTaskError

    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines: list[str] = str(error).strip().splitlines()
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        return f"its __init__ raised {_one_line(_after_traceback(lines))}"
    # After the headline stand indented names of the actor, then the cause.
    causes = [line for line in lines[1:] if line[:1] not in ("\t", " ", "")]
    return _one_line(causes or lines)


def _after_traceback(lines: list[str]) -> list[str]:
    frames = [at for at, line in enumerate(lines) if line.startswith("  ")]
    last = max(frames, default=-1)
    return lines[last + 1 :] or lines[-1:]


def _one_line(lines: list[str]) -> str:
    text = " ".join(" ".join(lines).split())
    if len(text) <= _LENGTH:
        return text
    whole_words = text[: _LENGTH + 1].rpartition(" ")[0] or text[:_LENGTH]
    return f"{whole_words} ..."


def original(error: BaseException) -> BaseException:
    """What the actor raised, where Ray sends it; the error itself otherwise."""
    cause: Any = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
