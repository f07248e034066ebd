"""Without its framework, an integration says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from fabric_ray.integrations import MissingFramework


@pytest.mark.parametrize("name", ["verl", "vllm"])
def test_a_missing_framework_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"fabric_ray.integrations.{name}"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingFramework, match=rf"`{name}\..*pip install 'fabric-ray\[{name}\]'"):
        importlib.import_module(module)
