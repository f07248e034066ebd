"""The layouts of Megatron-Core trainers are those of its own modules and parallel state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig, Moe, config_to_hf
from fabric_ray.plan import plan
from fabric_ray.weights import WeightSource
from fabric_ray.weights.families import target_side
from fabric_ray.weights.local import check_local
from fabric_ray.weights.trainers import Parallel, local_tensors, megatron_side
from fabric_ray.weights.trainers.looking import _layers, megatron_parts
from tests.processes import Other

_SMALL: dict[str, Any] = {
    "vocab": 120,
    "hidden": 32,
    "layers": 4,
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
WIDE = "tp-cp-ep-pp-dp"
"""The order of Megatron-Core's ``use_tp_pp_dp_mapping``."""
SIZES = {
    "tp": Parallel(tp=2),
    "one kv head": Parallel(tp=2),
    "pp": Parallel(pp=2),
    "cp": Parallel(cp=2),
    "dp": Parallel(dp=2),
    "ep": Parallel(dp=2, ep=2),
    "tp, ep": Parallel(tp=2, ep=2, etp=1),
    "vpp": Parallel(pp=2, vpp=2),
    "uneven": Parallel(pp=2),
    "custom": Parallel(pp=2),
    "no layers": Parallel(pp=2),
    "pp, dp": Parallel(pp=2, dp=2, order=WIDE),
    "empty stage": Parallel(pp=4),
}
STAGES = {"uneven": [1, 3], "custom": [3, 1], "no layers": [0, 4], "empty stage": [0, 2, 0, 2]}
CUSTOM = {
    "custom": [["embedding", "decoder", "decoder", "decoder"], ["decoder", "loss"]],
    "no layers": [["embedding"], ["decoder", "decoder", "decoder", "decoder", "loss"]],
    "empty stage": [["embedding"], ["decoder", "decoder"], [], ["decoder", "decoder", "loss"]],
}
"""Layouts of a pipeline, as Megatron-Core takes them."""


def megatron(config: ModelConfig, axis: str, part: int) -> Any:
    """The module that a rank of Megatron-Core has, or a part of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    moe: dict[str, Any] = {}
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    where = {"ignore_virtual": False, "vp_stage": None if virtual is None else part}
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
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=STAGES[axis][0] if axis == "uneven" else None,
        pipeline_model_parallel_layout=CUSTOM.get(axis),
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
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        vp_stage=where["vp_stage"],
    )


def check(connection: Any, rank: int, store: str, world: int) -> None:
    """A rank: says of each kind and axis how the module alone is refused, or what is wrong."""
    init = f"file://{store}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    for kind, axis in cases(world):
        try:
            connection.send(looked_at(kind, axis, rank))
        except Exception as error:
            connection.send(error)
            break
    dist.destroy_process_group()


def cases(world: int) -> list[tuple[str, str]]:
    axes = [axis for axis, sizes in SIZES.items() if sizes.world == world]
    return [(k, a) for k in CONFIGS for a in axes if k == "qwen3_moe" or "ep" not in a]


def looked_at(kind: str, axis: str, rank: int) -> str:
    """Compares a module with the layout that is described, and with the one found."""
    from megatron.core import parallel_state

    sizes, config = SIZES[axis], CONFIGS[kind]
    if axis == "one kv head":
        config = msgspec.structs.replace(config, kv_heads=1)
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        order=sizes.order,
        create_gloo_process_groups=False,
    )
    parts = [megatron(config, axis, part) for part in range(sizes.vpp)]
    model = parts[0] if len(parts) == 1 else parts
    side = megatron_side(
        config,
        sizes,
        layers="local",
        experts="sequential",
        stages=STAGES.get(axis),
        vocab_multiple=120 // sizes.tp,
    )
    planned = plan(side, target_side(config, tp=1))
    held = {n: t.detach() for n, t in local_tensors(model).items()}
    check_local(held, planned.local_containers("source", rank), rank)
    found = megatron_parts(model, config_to_hf(config))
    assert found[1] == side
    assert found[0].keys() == held.keys()
    source = WeightSource(model, config=config)
    assert source.side == side
    source.close()
    for field in ("layernorm_zero_centered_gamma", "rotary_interleaved"):
        setattr(parts[0].config, field, True)
        with pytest.raises(InvalidArgument, match=f"{field} .* is True, expected False"):
            WeightSource(model, config=config)
        setattr(parts[0].config, field, False)
    with pytest.raises(InvalidArgument, match="share_embeddings_and_output_weights is False"):
        WeightSource(model, config=msgspec.structs.replace(config, tied=True))
    try:
        WeightSource(parts[0]).close()
        return ""
    except InvalidArgument as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("world", [2, 4])
def test_a_side_says_what_megatron_holds_and_is_found_by_looking(
    tmp_path: Path, world: int
) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Other(check, rank, str(tmp_path / "store"), world))
            for rank in range(world)
        ]
        for kind, axis in cases(world):
            for number, refusal in enumerate([rank.hear(180) for rank in ranks]):
                if axis in ("cp", "dp") or (axis == "empty stage" and number == 2):
                    assert refusal == "", (kind, axis)
                else:
                    assert "Megatron-Core's with " in refusal, (kind, axis)
                    assert "WeightSource(model, config=config)" in refusal


def test_a_stage_without_layers_says_what_they_would_be_made_of() -> None:
    """By the specification that the module keeps; Transformer Engine needs a GPU."""
    from megatron.core.models.gpt import gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    stage: Any = torch.nn.Module()
    stage.transformer_layer_spec = spec
    assert _layers([stage]) == "local"
    engine = type("TENorm", (), {"__module__": "megatron.core.extensions.transformer_engine"})
    spec.submodules.input_layernorm = engine
    assert _layers([stage]) == "te"


def test_a_module_that_holds_old_parameters_until_the_next_pass_is_refused() -> None:
    """As Megatron-Core's DistributedDataParallel does, which needs a GPU."""
    model = torch.nn.Module()
    model.module = torch.nn.Linear(2, 2)
    model.ddp_config = SimpleNamespace(overlap_param_gather=True)
    with pytest.raises(InvalidArgument, match="overlap_param_gather"):
        local_tensors(model)
    with pytest.raises(InvalidArgument, match="overlap_param_gather"):
        WeightSource(model)
    assert local_tensors(model.module).keys() == {"weight", "bias"}
