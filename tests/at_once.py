"""Many threads of one process at once."""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

THREADS = 32


def attributes(path: str) -> set[str]:
    """The names of attributes that the code of a file uses."""
    tree = ast.parse(Path(path).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def unused(path: str, *classes: type) -> set[str]:
    """Public methods of classes, by ``Class.name``, that the code of a file does not call."""
    used = attributes(path)
    return {
        f"{cls.__name__}.{name}"
        for cls in classes
        for name in dir(cls)
        if not name.startswith("_") and name not in used and callable(getattr(cls, name))
    }


def at_once(work: Callable[[int], object], *, threads: int = THREADS, seconds: float = 240) -> None:
    """Runs ``work(number)`` in so many threads that begin together, and take turns as often as the
    interpreter can have them do so. All must end; what one of them raises is raised here."""
    errors: list[BaseException] = []
    together = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            together.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    every = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(threads)]
    before, end = sys.getswitchinterval(), time.monotonic() + seconds
    sys.setswitchinterval(1e-5)
    try:
        for thread in every:
            thread.start()
        for thread in every:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in every), "a thread hangs"
