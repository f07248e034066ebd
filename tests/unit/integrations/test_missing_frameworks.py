"""Without its framework, an integration says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from fabric_ray.integrations import MissingFramework
from fabric_ray.integrations.miles import install


@pytest.mark.parametrize("name", ["verl", "vllm"])
def test_a_missing_framework_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"fabric_ray.integrations.{name}"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingFramework, match=rf"`{name}\..*pip install .*'{name}>="):
        importlib.import_module(module)


def test_a_missing_ray_serve_llm_is_named_with_its_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray.llm", None)
    module = "fabric_ray.integrations.ray_llm"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingFramework, match=r"pip install 'ray\[serve,llm\]=="):
        importlib.import_module(module)


def test_where_miles_is_missing_it_is_said_where_to_install_the_updater(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "miles", None)
    with pytest.raises(MissingFramework, match="call this where its trainers run"):
        install(lambda updater: None)
