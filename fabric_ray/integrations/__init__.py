"""Plug-ins for frameworks; each module names the package that it needs when that is missing."""

from __future__ import annotations

import shlex
from importlib import import_module
from typing import Any

from fabric_ray.errors import FabricError
from fabric_ray.extras import how_to_install


class MissingFramework(FabricError, ImportError):
    """A package that an integration plugs into isn't installed; the message names the extra."""


def framework(module: str, extra: str, package: str | None = None) -> Any:
    """Imports a framework's module. `package` brings it if none of `extra` does.

    Raises:
        MissingFramework: it can't be imported; how to install it, and why it failed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        how = (
            f"run: {shlex.join(['pip', 'install', package])}" if package else how_to_install(extra)
        )
        raise MissingFramework(f"`{module}` can't be imported ({error}); {how}") from error


__all__ = ["MissingFramework", "framework"]
