"""The parameters that follow from published configurations are those that transformers makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import CONFIG_MAPPING

from fabric_ray.models import config_from_hf, parameter_shapes

ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((ROOT / "tests/unit/models/published_configs.json").read_text())
TEXT = {
    name: model["config"].get("text_config", model["config"]) for name, model in PUBLISHED.items()
}
NATIVE = [name for name, text in TEXT.items() if text.get("model_type") in CONFIG_MAPPING]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts/compare_with_transformers.py"
    spec = importlib.util.spec_from_file_location("compare_with_transformers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NATIVE)
def test_names_and_shapes_are_those_of_transformers(script: ModuleType, name: str) -> None:
    here = parameter_shapes(config_from_hf(TEXT[name], quantised=True))
    there = script.by_transformers(TEXT[name])
    assert script.differences(script.merged(here.items()), script.merged(there.items())) == []


def test_a_field_that_is_not_read_shows_as_a_parameter(script: ModuleType) -> None:
    fields = TEXT["Llama-3.2-1B"]
    here = parameter_shapes(config_from_hf(fields))
    there = script.by_transformers(fields | {"attention_bias": True})
    found = script.differences(script.merged(here.items()), script.merged(there.items()))
    assert len(found) == 4 * fields["num_hidden_layers"]
    assert "model.layers.0.self_attn.k_proj.bias: missing here, (512,) in transformers" in found
