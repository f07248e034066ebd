"""``config.json`` of published models: what follows from it for a push and for computing.

``published_configs.json`` has the files' fields, without those that they leave to transformers, and
the billions of parameters of the text model that transformers 5.19 makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from fabric_ray.demo.options import Kind
from fabric_ray.models import (
    InvalidConfig,
    ModelConfig,
    UnsupportedModel,
    config_from_hf,
    parameter_shapes,
)
from fabric_ray.models.config import check_computed
from fabric_ray.models.demo import DEMO_KINDS
from fabric_ray.models.kinds import ARCHITECTURES, KINDS
from fabric_ray.plan import plan
from fabric_ray.weights.families import UnknownFamily, source_side, target_side

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text()
)
COMPUTED = {"Llama-3.2-1B", "Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "DeepSeek-V2-Lite"}
PREFIX = "model.language_model.layers.0."


def read(name: str, **changes: Any) -> ModelConfig:
    """As a push reads it; changes are of the text model, and ``...`` takes a field away."""
    fields = json.loads(json.dumps(PUBLISHED[name]["config"]))
    text = fields.get("text_config", fields)
    text |= changes
    for field in [field for field, value in changes.items() if value is ...]:
        del text[field]
    return config_from_hf(fields, quantised=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    count = read(name).parameter_count
    assert count / 1e9 == pytest.approx(PUBLISHED[name]["billions"], abs=5e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rs_1_what_is_not_computed_is_refused_where_it_is_computed(name: str) -> None:
    config = read(name)
    if name in COMPUTED:
        check_computed(config)
        return
    with pytest.raises(UnsupportedModel):
        check_computed(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_model_is_planned_unless_its_layout_in_engines_is_unknown(name: str) -> None:
    config = structs.replace(read(name), layers=4, linear=None)
    why = ARCHITECTURES[config.kind].unknown_layout
    if why:
        with pytest.raises(UnknownFamily, match="ModuleReplica") as caught:
            target_side(config, tp=2)
        assert why in str(caught.value)
        return
    target = target_side(config, tp=2, ranks=(1, 2))
    assert plan(source_side(config), target).ranks("target") == (1, 2)
    prefix = "language_model.model." if config.nest else "model."
    assert all(c.name.startswith(prefix) or "lm_head" in c.name for c in target.containers)


STYLES = {
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2, "truncate": False},
    "longrope": {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]},
    "su": {"type": "su", "short_factor": [1.0], "long_factor": [2.0], "short_mscale": 1.1},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    "mrope": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "mrope, interleaved": {"rope_type": "default", "mrope_interleaved": True},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "none": {"rope_type": "none"},
    "not a number": {"rope_type": "linear", "factor": "two"},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Mistral-7B-v0.3", "DeepSeek-V2-Lite"])
def test_every_style_of_rotary_embeddings_has_the_same_sizes(name: str, style: str) -> None:
    plain = read(name)
    for place in ("rope_scaling", "rope_parameters"):
        found = read(name, **{"rope_scaling": None, place: STYLES[style]})
        assert parameter_shapes(found) == parameter_shapes(plain)
        with pytest.raises(UnsupportedModel):
            check_computed(found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_nulls_and_fields_unknown_here_change_no_size(name: str) -> None:
    plain = parameter_shapes(read(name))
    config = PUBLISHED[name]["config"]
    text = config.get("text_config", config)
    unknown = ("max_window_layers", "sliding_window", "rope_scaling", "mlp_bias", "layer_types")
    for field in (*unknown, "tie_word_embeddings", "use_qk_norm", "decoder_sparse_step", "dtype"):
        if not text.get(field):
            tied = field == "tie_word_embeddings" and read(name).tied
            assert (parameter_shapes(read(name, **{field: None})) == plain) is not tied
    extra = {"time_step_limit": [0.0, float("inf")], "mamba_ssm_dtype": "float32", "brand_new": {}}
    assert parameter_shapes(read(name, **extra)) == plain


@pytest.mark.parametrize(
    ("name", "field", "parameter", "shape"),
    [
        ("Mistral-7B-v0.3", "num_key_value_heads", "self_attn.k_proj.weight", (1024, 4096)),
        ("Ministral-3-8B", "head_dim", "self_attn.q_proj.weight", (4096, 4096)),
        ("Qwen3-30B-A3B", "num_key_value_heads", "self_attn.k_proj.weight", (512, 2048)),
        ("gpt-oss-20b", "attention_bias", "self_attn.o_proj.bias", (2880,)),
        ("gpt-oss-20b", "num_key_value_heads", "self_attn.k_proj.bias", (512,)),
        ("GLM-4.7-Flash", "first_k_dense_replace", "mlp.down_proj.weight", (2048, 10240)),
        ("GLM-4.7-Flash", "q_lora_rank", "self_attn.q_a_proj.weight", (768, 2048)),
        ("DeepSeek-V3.2", "first_k_dense_replace", "mlp.down_proj.weight", (7168, 18432)),
        ("gemma-3-27b", "head_dim", "self_attn.q_norm.weight", (256,)),
    ],
)
def test_a_missing_field_is_what_transformers_takes(
    name: str, field: str, parameter: str, shape: tuple[int, ...]
) -> None:
    """Llama's defaults were taken for every model."""
    shapes = parameter_shapes(read(name, **{field: ...}))
    assert {n.rpartition("layers.0.")[2]: s for n, s in shapes.items()}[parameter] == shape


def test_a_null_counts_as_given() -> None:
    for name, field in (("Mistral-7B-v0.3", "num_key_value_heads"), ("Qwen3-8B-yarn", "head_dim")):
        fields = read(name, **{field: None})
        assert (fields.kv_heads, fields.head_dim)[field == "head_dim"] in (32, 4096 // 32)
    names = parameter_shapes(read("DeepSeek-V3.2", n_shared_experts=None))
    assert not any("shared_experts" in name for name in names)


def test_dense_layers_are_read_as_transformers_5_writes_them() -> None:
    types = ["dense"] * 2 + ["sparse"] * 45
    found = read("GLM-4.7-Flash", mlp_layer_types=types, first_k_dense_replace=...)
    assert [found.has_experts(layer) for layer in range(4)] == [False, False, True, True]
    for wrong in (types[1:], ["dense", "mixed", *types[2:]]):
        with pytest.raises(InvalidConfig, match="47 layers; give dense or sparse for each"):
            read("GLM-4.7-Flash", mlp_layer_types=wrong)


def test_layers_without_an_indexer_of_their_own_are_read() -> None:
    """GLM-5.2; every layer was taken to have an indexer."""

    def indexed(**changes: Any) -> list[int]:
        names = parameter_shapes(read("GLM-5", num_hidden_layers=8, **changes))
        return [n for n in range(8) if f"model.layers.{n}.self_attn.indexer.wk.weight" in names]

    assert indexed() == list(range(8))
    assert indexed(index_topk_freq=4) == [0, 1, 5]
    assert indexed(index_topk_freq=3, index_skip_topk_offset=1) == [0, 3, 6]
    assert indexed(index_topk_pattern="FSSFSSSS") == [0, 3]
    assert indexed(indexer_types=["full", *["shared"] * 7], index_topk_freq=2) == [0]
    for wrong in ("FS", "FFFFFFFX"):
        with pytest.raises(InvalidConfig, match="8 layers; give full or shared for each"):
            indexed(index_topk_pattern=wrong)


def test_what_stands_around_a_text_model_is_its_own_unless_it_says_otherwise() -> None:
    fields = json.loads(json.dumps(PUBLISHED["Mistral-Small-3.2-24B"]["config"]))
    text = fields["text_config"]
    assert config_from_hf(fields).dtype == "bfloat16"
    fields["tie_word_embeddings"] = True
    assert config_from_hf(fields).tied
    text["tie_word_embeddings"] = None
    assert config_from_hf(fields).tied
    text["tie_word_embeddings"] = False
    assert not config_from_hf(fields).tied
    del text["model_type"]
    assert config_from_hf(fields).kind == "mistral"
    for place in (fields, text):
        place["quantization_config"] = {"quant_method": "fp8"}
        with pytest.raises(UnsupportedModel, match="quantised"):
            config_from_hf(fields)
        del place["quantization_config"]
    for nested in ({"model_type": "mamba"}, {"text_config": text}):
        with pytest.raises((UnsupportedModel, InvalidConfig)):
            config_from_hf(fields | {"text_config": nested})


def test_an_architecture_is_one_entry_of_one_table() -> None:
    assert tuple(ARCHITECTURES) == KINDS
    assert set(get_args(Kind)) == set(DEMO_KINDS), "what the demo offers"
    for architecture in ARCHITECTURES.values():
        assert not architecture.computed or architecture.quantised
