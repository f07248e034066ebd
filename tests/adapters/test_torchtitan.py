"""Modules of torchtitan, sharded by its own functions, fill modules of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.trainers import torchtitan_parts
from tests.adapters.trainer_processes import Processes, serve
from tests.processes import Other

RANKS = 2
# Two ranks part the rows of fused queries, keys and values within a group of heads.
_SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
_MOE = _SMALL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROLLOUTS: dict[str, Callable[[], Any]] = {
    "llama3": lambda: transformers.LlamaConfig(**_SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**_SMALL, tie_word_embeddings=True),
    "moe": lambda: transformers.Qwen3MoeConfig(**_MOE),
}
SIZES: dict[str, dict[str, int]] = {
    "fsdp": {"dp_shard": 2},
    "hsdp": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
}
CASES = [
    *((name, fused, "fsdp") for name in ROLLOUTS for fused in (True, False)),
    *((name, True, axis) for name in ROLLOUTS for axis in ("hsdp", "tp")),
    ("moe", True, "ep"),
]


def spec_of(name: str, fused: bool) -> Any:
    """A small model, as torchtitan's registry describes a large one."""
    module: Any = llama3 if name == "llama3" else qwen3
    spec = module.model_registry("debugmodel_moe" if name == "moe" else "debugmodel")
    config = spec.model
    sizes: dict[str, Any] = {
        "n_layers": 2,
        "dim": 48,
        "n_heads": 6,
        "n_kv_heads": 3,
        "fuse_qkv": fused,
        "attn_backend": "flex",
    }
    if name == "llama3":
        rope: Any = ComplexRoPE.Config(dim=8, max_seq_len=64, theta=5e5)
        config.layers = llama3._build_llama3_layers(**sizes, hidden_dim=56, rope=rope)
    else:
        sizes |= {"head_dim": 8, "rope": CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e6)}
        experts = {"moe_hidden_dim": 20, "num_experts": 6, "top_k": 2}
        config.layers = (
            qwen3._build_qwen3_moe_layers(**sizes, **experts, moe_comm_backend="standard")
            if name == "moe"
            else qwen3._build_qwen3_layers(**sizes, hidden_dim=56)
        )
    config.dim, config.vocab_size = 48, 101
    config.norm.normalized_shape = 48
    config.enable_weight_tying = name == "qwen3"
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = 101, 48
    config.lm_head.in_features, config.lm_head.out_features = 48, 101
    return spec


def sharding(config: Any, name: str, axis: str) -> None:
    """What `update_from_config` sets, which imports torchtitan's trainer and its datasets."""
    if name == "llama3":
        set_llama3_sharding_config(config, enable_sp=False)
    else:
        set_qwen3_sharding_config(config, enable_sp=False, enable_ep=axis == "ep")


def filled(spec: Any) -> Any:
    torch.manual_seed(1)
    model = spec.model.build()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_()
    return model


def train(connection: Any, rank: int, store: str, name: str, fused: bool, axis: str) -> None:
    """A rank that says what a checkpoint has, and then does what a controller asks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    parallel_dims.device_type = "cpu"
    spec = spec_of(name, fused)
    sharding(spec.model, name, axis)
    model, adapter = filled(spec), spec.state_dict_adapter(spec.model, None)
    connection.send(adapter.to_hf(model.state_dict()))
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | SIZES[axis]
    spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims(**sizes, world_size=RANKS),
        training=TrainingConfig(),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    tensors, side = torchtitan_parts(model, adapter)
    engine = TransferEngine(transport="shm")
    serve(connection, WeightSource(tensors, side=side, engine=engine))
    engine.close()
    dist.destroy_process_group()


def stacked(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint with a layer's experts in stacks, as transformers holds them."""
    found = {name: tensor for name, tensor in checkpoint.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in checkpoint.keys() - found.keys()}:
        gate, up, down = (
            [checkpoint[f"{prefix}.experts.{n}.{part}_proj.weight"] for n in range(6)]
            for part in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack(both)
        found[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return found


@pytest.mark.parametrize(("name", "fused", "axis"), CASES)
def test_sharded_modules_fill_modules_of_transformers(
    tmp_path: Path,
    open_engine: Callable[..., TransferEngine],
    name: str,
    fused: bool,
    axis: str,
) -> None:
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Other(train, rank, str(tmp_path / "store"), name, fused, axis))
            for rank in range(RANKS)
        ]
        wanted, _ = (stacked(trainer.hear(180)) for trainer in trainers)
        rollout = transformers.AutoModelForCausalLM.from_config(ROLLOUTS[name]())
        target = stack.enter_context(
            closing(WeightTarget(into=rollout, name="rollout", engine=open_engine("rollout")))
        )
        sync = WeightSync(trainers, ["rollout"], calls=Processes(), digest=True)
        assert sync.push().version == target.version == 1
        weights = rollout.state_dict()
        assert weights.keys() - wanted.keys() == ({"lm_head.weight"} if name == "qwen3" else set())
        for tensor, value in wanted.items():
            assert torch.equal(weights[tensor], value), tensor
        for trainer in trainers:
            trainer.say(None)


def test_a_part_that_does_not_say_which_is_refused() -> None:
    spec = spec_of("llama3", fused=True)
    model = spec.model.build()
    attention = model.get_submodule("layers.0.attention.qkv_linear.wqkv")
    attention.weight = torch.nn.Parameter(attention.weight[:48])
    with pytest.raises(InvalidArgument, match=r"`layers.0.*wqkv.weight` is \[48, 48\], expected"):
        torchtitan_parts(model, spec.state_dict_adapter(spec.model, None))


def test_an_adapter_that_computes_is_refused() -> None:
    spec = spec_of("qwen3", fused=False)

    class Scaled(spec.state_dict_adapter):  # type: ignore[name-defined, misc]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {name: 2 * tensor for name, tensor in super().to_hf(state_dict).items()}

    class Mixed(spec.state_dict_adapter):  # type: ignore[name-defined, misc]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {name: tensor.flip(-1) for name, tensor in super().to_hf(state_dict).items()}

    for adapter in (Scaled, Mixed):
        with pytest.raises(InvalidArgument, match="does more to `.*ReplicaSource and to_hf"):
            torchtitan_parts(spec.model.build(), adapter(spec.model, None))
