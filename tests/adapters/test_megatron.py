"""The layouts of Megatron-Core trainers are those of its own modules and parallel state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig, Moe
from fabric_ray.plan import plan
from fabric_ray.weights import WeightSource
from fabric_ray.weights.families import target_side
from fabric_ray.weights.local import check_local
from fabric_ray.weights.trainers import Parallel, local_tensors, megatron_side
from tests.processes import Other

RANKS = 2
_SMALL: dict[str, Any] = {
    "vocab": 120,
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "intermediate": 48,
    "qk_norm": True,
}
CONFIGS = {
    "qwen3": ModelConfig(kind="qwen3", **_SMALL, dtype="float32"),
    "qwen3_moe": ModelConfig(
        kind="qwen3_moe",
        **_SMALL,
        dtype="float32",
        moe=Moe(experts=4, top_k=2, intermediate=16),
    ),
}
SIZES = {
    "tp": Parallel(tp=2),
    "pp": Parallel(pp=2),
    "cp": Parallel(cp=2),
    "dp": Parallel(dp=2),
    "ep": Parallel(dp=2, ep=2),
    "tp, ep": Parallel(tp=2, ep=2, etp=1),
}


def megatron(config: ModelConfig) -> Any:
    """The module that a rank of Megatron-Core has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    moe: dict[str, Any] = {}
    if config.moe:
        moe = {
            "num_moe_experts": config.moe.experts,
            "moe_ffn_hidden_size": config.moe.intermediate,
            "moe_router_topk": config.moe.top_k,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    settings = TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # Neither attention over several ranks nor sequence parallelism is in layers without
        # Transformer Engine; both leave parameters as they are.
        pipeline_dtype=torch.float32,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.moe.experts if config.moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    return GPTModel(
        settings,
        spec,
        vocab_size=config.vocab,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
    )


def check(connection: Any, rank: int, store: str, kind: str, axis: str) -> None:
    """A rank: compares the module with the layout; says how the module alone is refused."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    sizes, config = SIZES[axis], CONFIGS[kind]
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        create_gloo_process_groups=False,
    )
    try:
        model = megatron(config)
        side = megatron_side(config, sizes, layers="local", experts="sequential", vocab_multiple=60)
        planned = plan(side, target_side(config, tp=1))
        held = {n: t.detach() for n, t in local_tensors(model).items()}
        check_local(held, planned.local_containers("source", rank), rank)
        try:
            WeightSource(model)
        except InvalidArgument as error:
            connection.send(str(error))
        else:
            connection.send("")
    except Exception as error:
        connection.send(error)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "axis"), [(k, a) for k in CONFIGS for a in SIZES if k == "qwen3_moe" or "ep" not in a]
)
def test_a_side_describes_what_megatron_holds_and_the_module_alone_is_refused(
    tmp_path: Path, kind: str, axis: str
) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Other(check, rank, str(tmp_path / "store"), kind, axis))
            for rank in range(RANKS)
        ]
        refusals = [rank.hear(180) for rank in ranks]
    for refusal in refusals:
        if axis in ("cp", "dp"):
            assert refusal == ""
        else:
            assert f"Megatron-Core's with {axis.split(',')[0]}=2" in refusal
            assert "side=megatron_side(config, Parallel(" in refusal
