"""Public models have the sizes that their makers give, and demo models those asked for."""

from __future__ import annotations

from typing import Any

import pytest

from fabric_ray.models import InvalidConfig, ModelError, UnsupportedModel, demo_config
from fabric_ray.models.demo import DEMO_KINDS
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


@pytest.mark.parametrize("kind", DEMO_KINDS)
@pytest.mark.parametrize("parameters", [3e5, 8e6, 300e6])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)])
def test_demo_models_have_the_size_asked_for_and_are_awkward(
    kind: Any, parameters: float, tp: int, ep: int
) -> None:
    config = demo_config(parameters=parameters, kind=kind, tp=tp, ep=ep)
    assert 0.75 < config.parameter_count / parameters < 1.33
    assert config.kind == kind
    assert all(config.vocab % n for n in range(2, 65)), "the vocabulary never shards evenly"
    assert config.kv_heads <= max(tp, 2)
    assert (config.moe is not None) == kind.endswith("moe")


def test_impossible_demo_models_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="1000 parameters"):
        demo_config(parameters=1000)
    with pytest.raises(InvalidConfig, match="ep=3"):
        demo_config(tp=4, ep=3)
    with pytest.raises(UnsupportedModel, match="'gpt2'"):
        demo_config(kind="gpt2")  # type: ignore[arg-type]
