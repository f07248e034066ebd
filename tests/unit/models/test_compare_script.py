"""What ``scripts/compare_with_transformers.py`` says where there is nothing to compare with."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.unit.models.small_models import PUBLISHED

SCRIPT = Path(__file__).parents[3] / "scripts/compare_with_transformers.py"


def test_without_transformers_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED["Llama-3.2-1B"]["config"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(file)])
    with pytest.raises(SystemExit, match="pip install torch transformers"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
