"""What layers of vLLM have computed of their weights is computed again after an update."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fabric_ray.integrations.vllm_computed import renew_computed


def test_rs_1_layers_of_glm_5_keep_nothing_of_earlier_weights() -> None:
    with torch.inference_mode():  # as vLLM's first step
        heads, merged = torch.zeros(4, 2), torch.zeros(9, 4)
    weight = torch.randn(6, 4)
    projection = SimpleNamespace(weight=weight)
    renew_computed(SimpleNamespace(wk_weights_proj=projection, head_dim=4, _wp_fp32=heads))
    assert torch.equal(heads, weight[4:].t())
    convolutions = {f"{part}_conv1d": torch.randn(3, 1, 4) for part in "qkv"}
    own = {name: SimpleNamespace(weight=weight) for name, weight in convolutions.items()}
    renew_computed(SimpleNamespace(**own, _merged_conv_weight=merged))
    assert torch.equal(merged, torch.cat([w[:, 0] for w in convolutions.values()]))
