"""Quantised weights are never read as plain ones: the tensor and its dtype are named instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor

from fabric_ray.inference.model import Model
from fabric_ray.models import CheckpointError, UnsupportedModel, read_config
from fabric_ray.models.boxes import load_parameters
from fabric_ray.models.checkpoint import Checkpoint, save_checkpoint
from fabric_ray.models.transformer import Transformer
from tests.unit.models.small_models import SMALL, waves

CONFIG = SMALL["llama"]
MODULE = "model.layers.1.mlp.down_proj."
WEIGHT = MODULE + "weight"


def stored(directory: Path, *, without: str = "", **tensors: Tensor) -> Path:
    """The small model's checkpoint with tensors of a module of it replaced or added."""
    save_checkpoint(directory, CONFIG, waves(CONFIG))
    full = waves(CONFIG) | {MODULE + name: tensor for name, tensor in tensors.items()}
    full.pop(MODULE + without, None)
    save_file(full, directory / "model.safetensors")
    return directory


def said(directory: Path, **fields: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def scaled(dtype: torch.dtype) -> Tensor:
    return (waves(CONFIG)[WEIGHT] * 100).to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_only_plain_floats_are_read_as_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    stored(tmp_path, weight=scaled(dtype))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.parameter == WEIGHT
    assert "bfloat16" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_plain_floats_of_any_width_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    stored(tmp_path, weight=waves(CONFIG)[WEIGHT].to(dtype))
    assert torch.equal(Checkpoint(tmp_path)[WEIGHT], waves(CONFIG)[WEIGHT].to(dtype).float())


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("weight_scale_inv", ""),
        ("weight_scale", ""),
        ("weight_scale_2", ""),
        ("input_scale", ""),
        ("weights_scaling_factor", ""),
        ("weight.absmax", ""),
        ("SCB", ""),
        ("weight_zero_point", ""),
        ("qweight", "weight"),
        ("weight_packed", "weight"),
        ("weight_blocks", "weight"),
        ("input_quantizer._pre_quant_scale", ""),
        ("weight_quantizer._amax", ""),
        ("weight._scale", ""),
        ("scale_weight", ""),
        ("zeros", ""),
        ("meta", ""),
        # What another configuration would have.
        ("bias", ""),
        ("lora_A.default.weight", ""),
    ],
)
def test_what_belongs_to_a_weight_is_not_ignored(name: str, without: str, tmp_path: Path) -> None:
    stored(tmp_path, without=without, **{name: torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.parameter == WEIGHT
    assert MODULE + name in str(caught.value)


@pytest.mark.parametrize(
    "name", ["self_attn.q_norm.weight", "self_attn.sinks", "pre_feedforward_layernorm.weight"]
)
def test_rs_1_what_a_layer_computes_with_is_not_ignored(name: str, tmp_path: Path) -> None:
    """It is another architecture's, and its config.json says that it is llama's."""
    full = waves(CONFIG) | {f"model.layers.1.{name}": torch.ones(4)}
    save_checkpoint(tmp_path, CONFIG, waves(CONFIG))
    save_file(full, tmp_path / "model.safetensors")
    for load in (lambda: Checkpoint(tmp_path), lambda: Model.of(CONFIG, full, revision="1")):
        with pytest.raises(CheckpointError, match=rf"layers\.1\.{name} is stored"):
            load()


def test_rs_1_a_head_that_differs_from_the_embedding_is_not_ignored(tmp_path: Path) -> None:
    tied = structs.replace(CONFIG, tied=True)
    full = waves(tied)
    save_checkpoint(tmp_path, tied, full)
    full["lm_head.weight"] = full["model.embed_tokens.weight"].clone()
    save_file(full, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path)
    assert Model.of(tied, full, revision="1")
    full["lm_head.weight"][-1, -1] += 1
    save_file(full, tmp_path / "model.safetensors")
    for load in (lambda: Checkpoint(tmp_path), lambda: Model.of(tied, full, revision="1")):
        with pytest.raises(CheckpointError, match="tie_word_embeddings") as caught:
            load()
        assert caught.value.parameter == "lm_head.weight"


def test_rs_1_scales_that_an_index_does_not_name_are_not_ignored(tmp_path: Path) -> None:
    stored(tmp_path, weight_scale=torch.ones(1))
    index = {"weight_map": dict.fromkeys(waves(CONFIG), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_scale") as caught:
        Checkpoint(tmp_path)
    assert caught.value.parameter == WEIGHT


def test_integers_and_cache_scales_that_change_no_weight_are_ignored(tmp_path: Path) -> None:
    full = waves(CONFIG) | {
        "model.position_ids": torch.arange(4),
        "model.layers.0.self_attn.mask": torch.ones(2, dtype=torch.bool),
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
        "model.layers.0.self_attn.v_scale": torch.ones(1),
        "model.layers.0.self_attn.k_proj.output_scale": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.num_batches_tracked": torch.tensor(0),
        # Of a layer that the model doesn't have, such as one that drafts tokens.
        "model.layers.9.mlp.down_proj.weight_scale_inv": torch.ones(1),
    }
    save_checkpoint(tmp_path, CONFIG, waves(CONFIG))
    save_file(full, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint(tmp_path)[WEIGHT], full[WEIGHT])


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_a_config_that_speaks_of_quantised_weights_is_refused(key: str, tmp_path: Path) -> None:
    said(stored(tmp_path), **{key: {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedModel, match="quantised=True"):
        Checkpoint(tmp_path)
    assert read_config(tmp_path, quantised=True) == CONFIG


@pytest.mark.parametrize(
    "name",
    [
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
    ],
)
def test_a_file_beside_the_config_that_says_so_is_read(name: str, tmp_path: Path) -> None:
    (stored(tmp_path) / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        Checkpoint(tmp_path)
    assert read_config(tmp_path, quantised=True) == CONFIG
    # ModelOpt's way to say that key/value caches alone are quantised.
    (tmp_path / name).write_text('{"quantization": {"quant_algo": null}}')
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.up_proj", "self_attn.q_proj"])
def test_rs_1_tensors_in_memory_are_not_cast_without_their_scales(
    name: str, dtype: torch.dtype
) -> None:
    """Torch promotes integers to the dtype of what they are fused with."""
    weight = f"model.layers.1.{name}.weight"
    quantised = waves(CONFIG) | {weight: (waves(CONFIG)[weight] * 100).to(dtype)}
    stored_as = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=stored_as) as caught:
        Model.of(CONFIG, quantised, revision="1")
    assert caught.value.parameter == weight

    class Source:
        def box(self, name: str, box: tuple[slice, ...]) -> Tensor:
            return quantised[name][box]

    with pytest.raises(CheckpointError, match=stored_as) as caught:
        load_parameters(Transformer(CONFIG), Source())
    assert caught.value.parameter == weight


def test_rs_1_scales_in_memory_are_not_ignored() -> None:
    full = waves(CONFIG) | {MODULE + "weight_scale_inv": torch.ones(1)}
    with pytest.raises(CheckpointError, match="weight_scale_inv") as caught:
        Model.of(CONFIG, full, revision="1")
    assert caught.value.parameter == WEIGHT
