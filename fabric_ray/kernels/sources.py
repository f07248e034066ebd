"""The sources of kernels, as they lie in this package."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from fabric_ray.errors import InvalidArgument

FOLDER = Path(__file__).parent
#: What every kernel is compiled for in tests; NVRTC takes any other that it knows, too.
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A file of kernels, and whatever it includes."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    """Name and text of each, in the order of names."""


@functools.cache
def sources() -> tuple[str, ...]:
    """All files of kernels, by name: ``moe/steps.cu``."""
    return tuple(sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu")))


def source(name: str) -> Source:
    """One of :func:`sources`.

    Raises:
        InvalidArgument: there is no such file.
    """
    if name not in sources():
        raise InvalidArgument(f"there are no kernels in {name}; there are {', '.join(sources())}")
    text = _text(name)
    headers: dict[str, str] = {}
    new = _INCLUDE.findall(text)
    while new:
        header = new.pop()
        if header not in headers:
            headers[header] = _text(header)
            new += _INCLUDE.findall(headers[header])
    return Source(name, text, tuple(sorted(headers.items())))


@functools.cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text()
