"""Faces of other transfer libraries over this one: code that is written to them runs as it is.

`shim_path` gives the folders to put on ``PYTHONPATH`` so that ``import nixl`` and
``import mooncake`` find these in every process, those that a framework starts included.
"""

from __future__ import annotations

from pathlib import Path

from fabric_ray.errors import InvalidArgument

LIBRARIES = ("mooncake", "nixl")


def shim_path(*libraries: str) -> str:
    """What to put first on ``PYTHONPATH``; ``python -m fabric_ray.compat nixl`` prints it.

    Args:
        libraries: ``mooncake``, ``nixl``; both if none is named.

    Raises:
        InvalidArgument: there is no such face.
    """
    for name in libraries:
        if name not in LIBRARIES:
            raise InvalidArgument(f"there is no face of {name!r}; there are {', '.join(LIBRARIES)}")
    shims = Path(__file__).parent / "shims"
    return ":".join(str(shims / name) for name in libraries or LIBRARIES)


__all__ = ["LIBRARIES", "shim_path"]
