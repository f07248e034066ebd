"""The script that breaks lines on purpose, for tests of its table and of what it covers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/mutations.py"


@pytest.fixture(scope="session")
def mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
