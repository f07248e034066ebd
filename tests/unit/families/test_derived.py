"""Tensors that no parameter equals are computed from what was pushed."""

from __future__ import annotations

import pytest
import torch

from fabric_ray.weights.families import (
    Derived,
    Family,
    IncompleteFamily,
    family_of,
    post_load,
    target_containers,
)
from fabric_ray.weights.reference import expected_containers
from tests.unit.models.small_models import LAID_OUT, SMALL, waves

CONFIG = LAID_OUT["deepseek_v3"]
FULL = waves(CONFIG)
KV_B = "model.layers.{}.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_absorbed_matrices_compute_what_keys_and_values_do(tp):
    """A query times its head's keys, and attention times its values, by way of the latent."""
    latent = CONFIG.latent
    assert latent is not None
    heads = CONFIG.heads // tp
    compressed = torch.randn(7, latent.kv_rank)
    queries = torch.randn(heads, 7, latent.nope_dim)
    for rank in range(tp):
        held = expected_containers(CONFIG, FULL, tp=tp, rank=rank)
        derived = post_load(CONFIG, held)
        assert len(derived) == 2 * CONFIG.layers
        for layer in range(CONFIG.layers):
            kv = (compressed @ held[KV_B.format(layer)].T).view(7, heads, -1)
            keys, values = kv[..., : latent.nope_dim], kv[..., latent.nope_dim :]
            w_kc = derived[f"model.layers.{layer}.self_attn.w_kc"]
            w_vc = derived[f"model.layers.{layer}.self_attn.w_vc"]
            scores = torch.bmm(queries, w_kc) @ compressed.T
            torch.testing.assert_close(scores, torch.einsum("htd,shd->hts", queries, keys))
            mixed = torch.bmm(scores @ compressed, w_vc)
            torch.testing.assert_close(mixed, torch.einsum("hts,shd->htd", scores, values))


def test_later_versions_go_to_the_same_memory():
    held = expected_containers(CONFIG, FULL, tp=2, rank=1)
    derived = post_load(CONFIG, held)
    places = {name: tensor.data_ptr() for name, tensor in derived.items()}
    held = {name: 2 * tensor for name, tensor in held.items()}
    again = post_load(CONFIG, held, out=derived)
    assert again is derived
    assert {name: tensor.data_ptr() for name, tensor in derived.items()} == places
    for name, tensor in post_load(CONFIG, held).items():
        assert torch.equal(derived[name], tensor)


def test_what_is_missing_is_named():
    held = expected_containers(CONFIG, FULL, tp=1, rank=0)
    derived = post_load(CONFIG, held)
    del derived["model.layers.1.self_attn.w_vc"]
    with pytest.raises(IncompleteFamily, match=r"layers\.1\.self_attn\.w_vc .*without `out`"):
        post_load(CONFIG, held, out=derived)
    both = Derived("x.{layer}", (KV_B.format("{layer}"), "y.{layer}.z"), lambda *_: None)
    with pytest.raises(IncompleteFamily, match=r"derives x.* from y\.0\.z"):
        post_load(CONFIG, held, family=Family("mine", (), (both,)))
    absorbed = Family("mine", (), family_of("kimi_k2").derived)
    with pytest.raises(IncompleteFamily, match="llama has no latent attention"):
        post_load(SMALL["llama"], held, family=absorbed)
    assert post_load(SMALL["llama"], held) == {}


def test_engines_call_one_container_differently():
    names = {}
    for engine in ("sglang", "vllm"):
        specs = target_containers(CONFIG, tp=2, rank=0, family=family_of("kimi_k2", engine=engine))
        names[engine] = {spec.name for spec in specs}
    fused = "model.layers.{}.self_attn.fused_qkv_a_proj{}.weight"
    layers = range(CONFIG.layers)
    assert names["sglang"] - names["vllm"] == {fused.format(i, "_with_mqa") for i in layers}
    assert names["vllm"] - names["sglang"] == {fused.format(i, "") for i in layers}
