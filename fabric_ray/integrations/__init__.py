"""Plug-ins for frameworks; each module names the package that it needs when that is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fabric_ray.errors import FabricError
from fabric_ray.extras import how_to_install


class MissingFramework(FabricError, ImportError):
    """A package that an integration plugs into isn't installed; the message names the extra."""


def framework(module: str, extra: str) -> Any:
    """Imports a framework's module.

    Raises:
        MissingFramework: it can't be imported; how to install it, and why it failed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingFramework(
            f"`{module}` can't be imported ({error}); {how_to_install(extra)}"
        ) from error


__all__ = ["MissingFramework", "framework"]
