"""A model that was saved is the model that was made; what can't be computed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import TINY, tiny
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import save_checkpoint
from fabric_ray.models.config import ModelConfig, Yarn
from fabric_ray.models.errors import InvalidConfig, UnsupportedModel
from fabric_ray.models.hf import config_from_hf
from fabric_ray.weights.families import Indivisible
from tests.unit.inference.engines import followed, text
from tests.unit.models.small_models import LAID_OUT, latent

MLA: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "torch_dtype": "float32",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
"""As in DeepSeek-V2's own configurations."""


def saved_mla(directory: Path, **changes: object) -> Path:
    fields = MLA | changes
    (directory / "config.json").write_text(json.dumps(fields))
    initial = InitialWeights(config_from_hf(fields), std=0.125)
    save_file(dict(initial), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    if name == "tiny-mla":
        saved_mla(tmp_path)
    else:
        save_checkpoint(tmp_path, tiny(name), InitialWeights(tiny(name), std=0.125))
    loaded = Model.load(tmp_path, tp=2, dtype="float64")
    made = Model.random(loaded.config, tp=2, dtype="float64")
    tokens = text(30)
    found = followed(TorchEngine(loaded), tokens, 25)
    assert torch.equal(found, followed(TorchEngine(made), tokens, 25))


def test_the_embeddings_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    plain = Model.load(saved_mla(tmp_path), dtype="float64")
    scaled = Model.load(saved_mla(tmp_path, rope_scaling=YARN), dtype="float64")
    assert scaled.config.rope.yarn == Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert scaled.fingerprint != plain.fingerprint
    with pytest.raises(InvalidConfig, match="by a factor of 0"):
        Model.load(saved_mla(tmp_path, rope_scaling=YARN | {"factor": 0.0}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 40}}, "'linear'"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "'yarn'.*attention_factor"),
        ({"topk_method": "group_limited_greedy"}, "topk_method 'group_limited_greedy'"),
        ({"routed_scaling_factor": 16.0}, "routed_scaling_factor 16.0"),
        ({"n_group": 8}, "n_group 8"),
        ({"norm_topk_prob": True}, "norm_topk_prob True"),
    ],
)
def test_what_a_config_asks_beyond_what_is_computed_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Model.load(saved_mla(tmp_path, **changes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LAID_OUT["kimi_k2"], "'kimi_k2'"),
        (latent(moe=LAID_OUT["kimi_k2"].moe), "correction bias"),
        (latent(latent=LAID_OUT["glm_moe_dsa"].latent), "sparse attention"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: ModelConfig, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Model.random(config)


def test_a_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    config = tiny("llama")
    prints = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_checkpoint(tmp_path / name, config, InitialWeights(config, seed=seed))
        prints.append(Model.load(tmp_path / name).fingerprint)
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
    named = [Model.load(tmp_path / name, revision="v7", tp=tp) for name, tp in (("a", 1), ("c", 2))]
    assert named[0].fingerprint == named[1].fingerprint
    assert named[0].fingerprint.startswith("llama/float32/")


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(Indivisible, match="use tp="):
        Model.random(tiny("llama"), tp=3)
    with pytest.raises(InferenceError, match="dtype 'int8' isn't computed"):
        Model.random(tiny("llama"), dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(InferenceError, match="no small model is called 'huge'"):
        tiny("huge")


def test_a_seed_is_a_model() -> None:
    config = structs.replace(tiny("llama"), layers=1)
    tokens = text(10)
    logits = [followed(TorchEngine(Model.random(config, seed=s)), tokens, 10) for s in (3, 3, 4)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
