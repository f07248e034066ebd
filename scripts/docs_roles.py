"""For mkdocstrings: docstrings mark names as ``:class:`X```, pages show them as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=`)")


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub("", obj.docstring.value)
