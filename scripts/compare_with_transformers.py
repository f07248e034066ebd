"""Compares the parameters that follow from a ``config.json`` here and in transformers.

``python scripts/compare_with_transformers.py config.json --name MODEL-7B`` needs transformers and
torch, and no weights: the model has no memory. It prints every parameter that differs and exits
with 1, or prints the model's line for ``tests/unit/models/published_configs.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fabric_ray.models import config_from_hf, parameter_shapes

Shape = tuple[int, ...]

_EXPERTS = re.compile(r"(.*\.experts)\..*")


def by_transformers(fields: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of the parameters of the text model, and of routers' correction biases,
    which are buffers there."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise SystemExit(
            f"nothing was compared: {error}; run `pip install torch transformers` here"
        ) from error

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    biases = (pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias"))
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *biases)}


def merged(shapes: Iterable[tuple[str, Shape]]) -> dict[str, Shape]:
    """The same with the elements of all experts of a layer as one: transformers stacks them."""
    out: dict[str, Shape] = {}
    for name, shape in shapes:
        if (experts := _EXPERTS.fullmatch(name)) is None:
            out[name] = shape
        else:
            key = f"{experts[1]} (elements)"
            out[key] = (out.get(key, (0,))[0] + math.prod(shape),)
    return out


def differences(here: dict[str, Shape], there: dict[str, Shape]) -> list[str]:
    """A line for each parameter that differs."""
    return [
        f"{name}: {here.get(name, 'missing')} here, {there.get(name, 'missing')} in transformers"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--name", help="of the model; by default that of the folder")
    options = parser.parse_args(argv)
    fields = json.loads(options.config.read_text())
    text = fields.get("text_config", fields)
    here = parameter_shapes(config_from_hf(text, origin=str(options.config), quantised=True))
    there = by_transformers(text)
    if found := differences(merged(here.items()), merged(there.items())):
        print(*found, sep="\n")
        return 1
    billions = round(sum(map(math.prod, there.values())) / 1e9, 3)
    name = options.name or options.config.resolve().parent.name
    print(f"{json.dumps(name)}: {json.dumps({'billions': billions, 'config': fields})},")
    return 0


if __name__ == "__main__":
    sys.exit(main())
