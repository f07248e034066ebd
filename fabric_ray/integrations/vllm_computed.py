"""What layers of vLLM compute themselves, and no checkpoint has."""

from __future__ import annotations

from typing import Any

import torch

from fabric_ray.integrations import framework

RELOAD = "vllm.model_executor.model_loader.reload"


def keep_constants(model: torch.nn.Module) -> None:
    """Gives buffers their values: checkpoints may lack those that a model computes when it is made,
    and vLLM's reload would take whatever memory holds (RS-1)."""
    layerwise = framework(f"{RELOAD}.layerwise", "vllm")
    for layer in model.modules():
        kernel = layerwise.get_layerwise_info(layer).kernel_tensors
        for name, value in kernel[1].items() if kernel else ():
            own = layer._buffers.get(name)
            if own is None or not own.is_meta or name in layer._non_persistent_buffers_set:
                continue
            if (own.shape, own.dtype) == (value.shape, value.dtype):
                layer._buffers[name] = kept = value.detach().clone()
                kept.__dict__ |= own.__dict__  # its loader


def renew_computed(layer: Any) -> None:
    """Computes again what a layer has computed of its weights in its first step and keeps (RS-1).
    CUDA graphs have its address, so it stays in its memory. A step makes inference tensors, which
    can't be written outside inference mode."""
    with torch.inference_mode():
        if getattr(layer, "update_cache", None) is False:  # FourierRotaryEmbedding
            layer.cos_sin_cache.copy_(layer._compute_cos_sin_cache())
        if (gates := getattr(layer, "_combined_gate_weight", None)) is not None:  # MoERunner
            gates.copy_(torch.cat([layer.gate.weight, layer.shared_expert_gate.weight]))
        if (heads := getattr(layer, "_wp_fp32", None)) is not None:  # Indexer of GLM 5
            heads.copy_(layer.wk_weights_proj.weight[layer.head_dim :].t())
        if (merged := getattr(layer, "_merged_conv_weight", None)) is not None:  # KDA of GLM 5
            parts = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
            merged.copy_(torch.cat([part.weight.flatten(1) for part in parts]))
