"""Runs an example, or the Python of one Markdown page from top to bottom: ``run_page.py FILE``.

The blocks of a page run as one script, as a reader would copy them into a file. A block that isn't
a whole program by itself is fenced as ``py`` and left out.
"""

from __future__ import annotations

import functools
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[CodeType]:
    """The page's Python, with the line numbers that it has there."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(1))
        source = "\n" * line + found[1]
        yield compile(source, str(page), "exec")


def run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        exec(block, names)


def start_ray_without_dashboard() -> None:
    """Nothing here looks at it, and it is a third of what a start of Ray computes."""
    import ray

    ray.init = functools.partial(ray.init, include_dashboard=False)


def main(given: Path) -> None:
    if "ray.init(" in given.read_text():
        start_ray_without_dashboard()
    if given.suffix == ".md":
        run(given)
    else:
        runpy.run_path(str(given), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
