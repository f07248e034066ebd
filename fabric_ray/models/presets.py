"""Public models by name, from their ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fabric_ray.models.config import ModelConfig
from fabric_ray.models.errors import UnsupportedModel
from fabric_ray.models.hf import config_from_hf

PRESET_FIELDS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("presets.json").read_bytes()
)
"""What sizes follow from in each ``config.json``."""

PRESETS: dict[str, ModelConfig] = {
    name: config_from_hf(fields, origin=name, quantised=True)
    for name, fields in PRESET_FIELDS.items()
}
"""By name. Multi-token-prediction layers are left out, as engines leave them out."""


def preset(name: str) -> ModelConfig:
    """A public model by name, in any case.

    Raises:
        UnsupportedModel: none has that name.
    """
    config = PRESETS.get(name.lower())
    if config is None:
        raise UnsupportedModel(
            f"no model is called {name!r}; use one of {', '.join(PRESETS)}, or the path of a "
            "config.json",
            model_type=None,
        )
    return config
