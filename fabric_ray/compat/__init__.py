"""Interfaces of other transfer libraries over this one: their callers run unchanged.

`shim_path` gives the folders to put on ``PYTHONPATH`` so that ``import nixl``, ``import mooncake``
and ``import deep_ep`` find these in every process, also in those that a framework starts.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from fabric_ray.errors import InvalidArgument

LIBRARIES = ("deep_ep", "mooncake", "nixl", "nixl_ep", "pplx_garden", "pplx_kernels")
_DEFAULT = ("mooncake", "nixl")
_ALONE = ("deep_ep", "pplx_garden", "pplx_kernels")
"""Those that take the place of no installed one. NIXL brings ``nixl_ep`` along."""
_SHIMS = Path(__file__).parent / "shims"


def shim_path(*libraries: str) -> str:
    """What to put first on ``PYTHONPATH``; ``python -m fabric_ray.compat nixl`` prints it.

    Args:
        libraries: of :data:`LIBRARIES`; ``mooncake`` and ``nixl`` if none is named.

    Raises:
        InvalidArgument: there is no such interface; or it is ``deep_ep``, ``pplx_garden`` or
            ``pplx_kernels``, and that is installed.
    """
    for name in libraries:
        if name not in LIBRARIES:
            raise InvalidArgument(
                f"no interface of this library: got {name!r}, expected {' or '.join(LIBRARIES)}"
            )
        if name in _ALONE and (found := _installed(name)):
            raise InvalidArgument(_refusal(name, found))
    return ":".join(str(_SHIMS / name) for name in libraries or _DEFAULT)


def refuse_installed(package: str, shim: str) -> None:
    """What a shim begins with that takes the place of no installed package.

    Raises:
        ImportError: another one is on ``sys.path``.
    """
    if found := _installed(package):
        raise ImportError(_refusal(package, found), name=package, path=shim)


def _installed(package: str) -> str:
    """Where ``package`` is, other than here; empty if it is nowhere."""
    others = [entry for entry in sys.path if _SHIMS not in Path(entry or ".").resolve().parents]
    found = PathFinder.find_spec(package, others)
    return "" if found is None else found.origin or ""


def _refusal(package: str, found: str) -> str:
    return (
        f"{package} over fabric-ray does not take the place of an installed one: found {found}; "
        f"uninstall that, or leave {_SHIMS / package} out of PYTHONPATH"
    )


__all__ = ["LIBRARIES", "refuse_installed", "shim_path"]
