"""Interfaces of other transfer libraries over this one: their callers run unchanged.

`shim_path` gives the folders to put on ``PYTHONPATH`` so that ``import nixl`` and
``import mooncake`` find these in every process, also in those that a framework starts.
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
        InvalidArgument: there is no such interface.
    """
    for name in libraries:
        if name not in LIBRARIES:
            raise InvalidArgument(
                f"no interface of this library: got {name!r}, expected {' or '.join(LIBRARIES)}"
            )
    shims = Path(__file__).parent / "shims"
    return ":".join(str(shims / name) for name in libraries or LIBRARIES)


__all__ = ["LIBRARIES", "shim_path"]
