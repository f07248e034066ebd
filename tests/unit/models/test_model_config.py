"""Configurations: what is read, what is written, what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fabric_ray.inference.model import Model
from fabric_ray.models import (
    COMPUTED,
    InvalidConfig,
    Latent,
    Llama3Scaling,
    ModelConfig,
    Rope,
    UnsupportedModel,
    Yarn,
    config_from_hf,
    config_to_hf,
    parameter_dtype,
    parameter_shapes,
    read_config,
)
from fabric_ray.models.presets import PRESET_FIELDS
from fabric_ray.models.tensor_parallel import full_parameters
from fabric_ray.models.transformer import Transformer
from tests.unit.models.small_models import LAID_OUT, LATENT, SMALL

LLAMA_31_8B = PRESET_FIELDS["llama-3.1-8b"]
DEEPSEEK_V3 = PRESET_FIELDS["deepseek-v3"]


def llama(**changes: Any) -> dict[str, Any]:
    return LLAMA_31_8B | changes


def test_a_published_config_gives_the_published_size() -> None:
    config = config_from_hf(LLAMA_31_8B)
    assert config.parameter_count == 8_030_261_248
    assert config.head_dim == 128
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert config.dtype == "bfloat16"
    assert not config.tied


def test_the_most_positions_are_those_of_the_scaled_embeddings(tmp_path: Path) -> None:
    config = config_from_hf(LLAMA_31_8B)
    assert config.max_positions == 131072
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    assert read_config(tmp_path) == config
    without = llama()
    del without["max_position_embeddings"]
    assert config_from_hf(without).max_positions is None
    for wrong in (0, -1, 0.5, "many"):
        config = config_from_hf(llama(max_position_embeddings=wrong))
        assert "max_position_embeddings" in config.uncomputed


@pytest.mark.parametrize("name", SMALL)
def test_every_config_survives_writing_and_reading(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL[name])))
    assert read_config(tmp_path) == SMALL[name]
    assert read_config(tmp_path / "config.json") == SMALL[name]


def test_rope_is_read_from_either_place() -> None:
    old = config_from_hf(llama())
    scaling = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    new = llama(rope_parameters=scaling)
    del new["rope_scaling"], new["rope_theta"]
    assert config_from_hf(new) == old


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "llama", "qwen3_moe"]),
        ({"model_type": None}, ["None", "llama"]),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, ["'llava'", "'llama'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised", "unquantised"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_what_has_no_known_sizes_is_refused_by_name(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        config_from_hf(llama(**changes), origin="here/config.json")
    for word in ["here/config.json", *words]:
        assert word in str(caught.value)


FULL = {"rope_type": "default", "rope_theta": 500000.0}
SLIDING = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"use_sliding_window": True}, ["sliding"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, ["'longrope'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["'llama3'", "lack"]),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, ["mrope_section"]),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {"full_attention": FULL, "sliding_attention": SLIDING},
            },
            ["'full_attention'", "'sliding_attention'"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rope_parameters": FULL}, ["rope_parameters", "rope_scaling"]),
        ({"attention_multiplier": 0.0078125}, ["attention_multiplier"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        ({"clip_qkv": 8.0}, ["clip_qkv 8.0"]),
        ({"use_qkv_norm": True}, ["use_qkv_norm True"]),
        ({"dim_model_base": 256}, ["dim_model_base 256"]),
        ({"use_dynamic_ntk": True}, ["use_dynamic_ntk"]),
        ({"num_kv_shared_layers": 4}, ["num_kv_shared_layers"]),
        ({"hc_mult": 4}, ["hc_mult 4"]),
        ({"is_causal": False}, ["is_causal False"]),
        ({"use_rope": False}, ["use_rope False"]),
        ({"output_multiplier_scale": 0.5}, ["output_multiplier_scale 0.5"]),
        ({"nope_layers": [1, 3]}, ["nope_layers"]),
        ({"parallel_block": True}, ["parallel_block"]),
        ({"rope_theta": float("inf")}, ["rope_theta inf", "finite"]),
        ({"rope_theta": 0}, ["rope_theta 0"]),
        ({"rope_theta": "big"}, ["rope_theta 'big'", "number"]),
        ({"rope_scaling": {"rope_theta": 0.0}}, ["rope_theta 0.0"]),
        ({"rope_scaling": {"partial_rotary_factor": 0.0}}, ["partial_rotary_factor 0.0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps nan"]),
        (
            {"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"factor": float("inf")}},
            ["factor of 'llama3' inf"],
        ),
        (
            {"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"high_freq_factor": 1.0}},
            ["high_freq_factor of 'llama3' 1.0", "above 1"],
        ),
        (
            {
                "model_type": "qwen3",
                "rope_scaling": None,
                "layer_types": ["sliding_attention"] * 32,
            },
            ["without use_sliding_window"],
        ),
    ],
)
def test_what_changes_arithmetic_alone_is_refused_where_it_is_computed(
    changes: dict[str, Any], words: list[str]
) -> None:
    config = config_from_hf(llama(**changes))
    plain = llama(model_type=changes.get("model_type", "llama"))
    assert parameter_shapes(config) == parameter_shapes(config_from_hf(plain))
    tiny = structs.replace(SMALL["llama"], uncomputed=config.uncomputed)
    for compute in (
        lambda: Transformer(tiny),
        lambda: full_parameters(tiny, []),
        lambda: Model.random(tiny),
    ):
        with pytest.raises(UnsupportedModel) as caught:
            compute()
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(UnsupportedModel):
        config_to_hf(config)


def test_fields_that_change_nothing_are_ignored() -> None:
    inert = {
        "attention_dropout": 0.1,
        "router_aux_loss_coef": 0.001,
        "initializer_range": 0.02,
        "_attn_implementation": "sdpa",
        "pretraining_tp": 1,
        "use_cache": True,
        "output_router_logits": False,
        "embedding_multiplier": 1.0,
        "logit_softcapping": None,
        "quantization_config": None,
        "sliding_window": 4096,
        "attn_pdrop": 0.1,
        "use_flash_attn": True,
        "num_logits_to_keep": 5,
        "some_list": [0.0, float("inf")],
    }
    assert config_from_hf(llama(**inert)) == config_from_hf(llama())


def test_rope_by_type_of_layer_is_read_where_all_layers_share_it() -> None:
    """It was once read as theta 10000."""
    fields = llama(rope_parameters={"full_attention": FULL})
    del fields["rope_scaling"], fields["rope_theta"]
    config = config_from_hf(fields)
    assert (config.rope, config.uncomputed) == (Rope(500000.0), "")
    both = {"full_attention": FULL, "sliding_attention": SLIDING}
    only = config_from_hf(
        fields | {"rope_parameters": both, "layer_types": ["full_attention"] * 32}
    )
    assert (only.rope, only.uncomputed) == (Rope(500000.0), "")
    config = config_from_hf(fields | {"rope_parameters": both})
    assert config.uncomputed


@pytest.mark.parametrize(
    "field",
    [
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "max_window_layers",
        "rope_scaling",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "head_dim",
        "hidden_act",
        "mlp_only_layers",
        "decoder_sparse_step",
        "q_lora_rank",
        "norm_topk_prob",
    ],
)
def test_null_is_what_a_missing_field_is(field: str) -> None:
    fields = llama()
    fields.pop(field, None)
    assert config_from_hf(fields | {field: None}) == config_from_hf(fields)


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    text = json.dumps(llama(time_step_limit=[0.0, float("inf")], rope_scaling=None))
    assert "Infinity" in text
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path).hidden == 4096


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "big"}, ["hidden_size", "int"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"vocab_size": 1 << 63}, ["vocab_size"]),
        ({"num_key_value_heads": 5}, ["32 heads", "5 kv heads"]),
        ({"hidden_size": 4097}, ["4097", "32 heads", "head_dim"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"num_hidden_layers": 1_000_000}, ["layers", "10000"]),
        ({"max_window_layers": "all"}, ["max_window_layers", "int"]),
    ],
)
def test_nonsense_is_refused_with_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config_from_hf(llama(**changes))
    for word in words:
        assert word in str(caught.value)


def test_windows_are_read_as_qwen_says_them() -> None:
    said = {"model_type": "qwen3", "sliding_window": 64, "num_hidden_layers": 3}
    assert config_from_hf(llama(**said)).window is None
    said["use_sliding_window"] = True
    assert config_from_hf(llama(**said)).windowed_layers == ()  # from layer 28 on
    found = config_from_hf(llama(**said, max_window_layers=1))
    assert (found.window, found.windowed_layers) == (64, (1, 2))
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    found = config_from_hf(llama(**said, layer_types=types))
    assert [found.window_of(layer) for layer in range(3)] == [64, None, 64]
    with pytest.raises(InvalidConfig, match="2 layer_types are given for 3 layers"):
        config_from_hf(llama(**said, layer_types=types[1:]))
    found = config_from_hf(llama(**said, layer_types=["chunked_attention"] * 3))
    assert "'chunked_attention'" in found.uncomputed


def test_only_qwen_can_say_that_it_has_windows() -> None:
    with pytest.raises(UnsupportedModel, match="use one of qwen2, qwen3"):
        config_to_hf(structs.replace(SMALL["llama"], window=7, windowed_layers=(1,)))


def test_a_missing_field_is_named() -> None:
    fields = llama()
    del fields["vocab_size"]
    with pytest.raises(InvalidConfig, match="vocab_size"):
        config_from_hf(fields)
    with pytest.raises(InvalidConfig, match="num_experts"):
        config_from_hf(llama(model_type="qwen3_moe"))


@pytest.mark.parametrize("fields", [[], None, "llama", 3])
def test_json_that_is_no_object_is_refused(fields: Any) -> None:
    with pytest.raises(UnsupportedModel):
        config_from_hf(fields)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(InvalidConfig, match="no JSON"):
        read_config(tmp_path)


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    hf = config_to_hf(SMALL["qwen3_moe"]) | {"num_experts_per_tok": 7}
    with pytest.raises(InvalidConfig, match="7 of 6 experts"):
        config_from_hf(hf)


@pytest.mark.parametrize("name", [n for n, c in LAID_OUT.items() if c.kind not in COMPUTED])
def test_models_that_are_only_laid_out_are_not_computed(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="can't be computed here, only laid out"):
        Transformer(LAID_OUT[name])


@pytest.mark.parametrize("config", (LAID_OUT | LATENT).values(), ids=LAID_OUT | LATENT)
def test_a_config_that_would_be_incomplete_is_not_written(config: ModelConfig) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json of model type .* the one that the"):
        config_to_hf(config)


def test_glm4_fuses_gate_and_up_and_norms_what_a_layer_adds() -> None:
    fields = PRESET_FIELDS["glm-z1-9b"]
    config = config_from_hf(fields)
    assert config.parameter_count == 9_400_279_040
    layer = "model.layers.39."
    of_it = {n.removeprefix(layer): s for n, s in parameter_shapes(config).items() if layer in n}
    assert of_it == {
        "input_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.q_proj.bias": (4096,),
        "self_attn.k_proj.weight": (256, 4096),
        "self_attn.k_proj.bias": (256,),
        "self_attn.v_proj.weight": (256, 4096),
        "self_attn.v_proj.bias": (256,),
        "self_attn.o_proj.weight": (4096, 4096),
        "post_self_attn_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "mlp.gate_up_proj.weight": (27392, 4096),
        "mlp.down_proj.weight": (4096, 13696),
        "post_mlp_layernorm.weight": (4096,),
    }
    bare = {key: value for key, value in fields.items() if key != "head_dim"}
    assert config_from_hf(bare | {"hidden_size": 4160}).head_dim == 128


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"fused_mlp": True}, "fused_mlp is none of llama's"),
        ("qwen3", {"post_norms": True}, "post_norms is none of qwen3's"),
        ("glm4", {"mlp_bias": True}, "a fused MLP has no bias"),
        ("llama", {"rope": Rope(yarn=Yarn(4.0, 64))}, "latent attention only"),
        ("qwen3-windowed", {"window": None}, "give both or neither"),
        ("qwen3-windowed", {"windowed_layers": ()}, "give both or neither"),
        ("qwen3-windowed", {"window": 0}, "window is 0"),
        ("qwen3-windowed", {"windowed_layers": (3,)}, "not all among 3 layers"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim"),
        ("deepseek_v3", {"kv_heads": 2}, "kv_heads"),
        ("deepseek_v3", {"kind": "llama"}, "llama has no latent attention"),
        ("deepseek_v3", {"qkv_bias": True}, "qkv_bias"),
        ("deepseek_v3", {"latent": Latent(0, 8, 4, 6)}, "kv_rank"),
    ],
)
def test_what_contradicts_the_rest_is_refused(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        structs.replace((SMALL | LAID_OUT)[name], **changes)


def test_correction_biases_are_float32_whatever_the_model_is() -> None:
    config = structs.replace(LAID_OUT["glm4_moe"], dtype="bfloat16")
    dtypes = {name: parameter_dtype(config, name) for name in parameter_shapes(config)}
    biases = {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == biases
    assert set(dtypes.values()) == {"float32", "bfloat16"}


def test_variants_of_latent_attention() -> None:
    first = "model.layers.0.self_attn."
    lite = DEEPSEEK_V3 | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": None}
    names = parameter_shapes(config_from_hf(lite, quantised=True))
    assert names[first + "q_proj.weight"] == (128 * 192, 7168)
    assert first + "q_a_proj.weight" not in names
    assert "model.layers.3.mlp.gate.e_score_correction_bias" not in names
    names = parameter_shapes(config_from_hf(DEEPSEEK_V3, quantised=True))
    assert names[first + "kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert names["model.layers.3.mlp.shared_experts.up_proj.weight"] == (2048, 7168)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({}, UnsupportedModel, "quantised weights"),
        ({"quantization_config": None, "kv_lora_rank": None}, InvalidConfig, "kv_lora_rank"),
        ({"quantization_config": None, "n_routed_experts": None}, InvalidConfig, "n_routed"),
        ({"quantization_config": None, "attention_bias": True}, InvalidConfig, "qkv_bias"),
    ],
)
def test_what_latent_attention_needs_is_named(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        config_from_hf(DEEPSEEK_V3 | changes)


def test_experts_are_where_the_config_says() -> None:
    every_other = SMALL["qwen2_moe"]
    assert [every_other.has_experts(i) for i in range(3)] == [False, True, False]
    names = parameter_shapes(SMALL["qwen3_moe"])
    assert names["model.layers.0.mlp.experts.5.down_proj.weight"] == (32, 24)
    assert names["model.layers.1.mlp.down_proj.weight"] == (32, 48)
    assert names["model.layers.2.mlp.gate.weight"] == (6, 32)
