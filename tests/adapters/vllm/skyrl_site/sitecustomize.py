"""Python runs this in every process that has the folder in ``PYTHONPATH``, as Ray runs its hook in
every worker of a job."""

from __future__ import annotations

import sys
import typing

import typing_extensions

from fabric_ray.integrations import skyrl

if sys.version_info < (3, 12):
    # SkyRL asks for 3.12. Before it, pydantic reads no other.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
skyrl.install()
