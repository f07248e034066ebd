"""Public models have the sizes that their makers give."""

from __future__ import annotations

import pytest

from fabric_ray.models import ModelError
from fabric_ray.models.presets import PRESETS, preset

# Billions, without multi-token prediction.
PUBLIC = {
    "deepseek-v3": 671.03,
    "kimi-k2": 1026.41,
    "moonlight-16b-a3b": 15.96,
    "glm-z1-9b": 9.40,
    "glm-4.7-flash": 29.94,
    "glm-5": 743.91,
    "glm-4.5-air": 106.85,
    "qwen3-235b-a22b": 235.09,
    "qwen3-30b-a3b": 30.53,
    "llama-3.1-8b": 8.03,
}


def test_every_model_has_its_size() -> None:
    counted = {name: round(config.parameter_count / 1e9, 2) for name, config in PRESETS.items()}
    assert counted == PUBLIC


def test_names_in_any_case() -> None:
    assert preset("Kimi-K2") is PRESETS["kimi-k2"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match=r"no model is called 'kimi-k3'.*kimi-k2.*config\.json"):
        preset("kimi-k3")
