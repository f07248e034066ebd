"""Modules of torchtitan, sharded by its own functions, fill modules of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from fabric_ray import TransferEngine
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


class Case(NamedTuple):
    name: str
    fused: bool = True
    """Whether queries, keys and values are one parameter, as torchtitan has them by default."""


MODELS = tuple(map(Case, ROLLOUTS))
CASES = {
    "dp_shard": (*MODELS, *(Case(name, fused=False) for name in ROLLOUTS)),
    "dp_replicate": (Case("moe"),),
    "tp": MODELS,
    "ep": (Case("moe"),),
    "pp": (Case("llama3"),),
}
"""By the axis of two ranks, each of which gets processes: torchtitan keeps the meshes of one."""


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


def filled(spec: Any) -> Any:
    torch.manual_seed(1)
    model = spec.model.build()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_()
    return model


def stage(model: Any, rank: int) -> None:
    """Leaves a rank what a pipeline of torchtitan leaves it."""
    del model.layers[str(1 - rank)]
    for name in ("norm", "lm_head") if rank == 0 else ("tok_embeddings",):
        setattr(model, name, None)


def train(connection: Any, rank: int, store: str, axis: str) -> None:
    """A rank that for each case says what a checkpoint has, and does what a controller asks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    parallel_dims.device_type = "cpu"
    # The default parts tensors by a lazy clone, which fails on CPU.
    backend: Any = "partial_dtensor" if axis in ("tp", "ep") else "spmd_types"
    set_spmd_backend(backend)
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | {axis: RANKS}
    sizes |= {"dp_shard": RANKS} if axis == "ep" else {}
    dims = ParallelDims(**sizes, world_size=RANKS, spmd_backend=backend)
    engine = TransferEngine(transport="shm")
    for case in CASES[axis]:
        spec = spec_of(case.name, case.fused)
        # As `update_from_config` does, which imports torchtitan's trainer and its data sets.
        if case.name == "llama3":
            set_llama3_sharding_config(spec.model, enable_sp=False)
        else:
            set_qwen3_sharding_config(spec.model, enable_sp=False, enable_ep=axis == "ep")
        model, adapter = filled(spec), spec.state_dict_adapter(spec.model, None)
        connection.send(adapter.to_hf(model.state_dict()))
        if axis == "pp":
            stage(model, rank)
        else:
            spec.parallelize_fn(
                model,
                parallel_dims=dims,
                training=TrainingConfig(),
                parallelism=ParallelismConfig(spmd_backend=backend),
                compile_config=CompileConfig(enable=False),
                ac_config=None,
                dump_folder="",
            )
            if model.enable_weight_tying:  # parallelizing unties; `init_states` then does this
                model.tok_embeddings.weight = model.lm_head.weight
        tensors, side = torchtitan_parts(model, adapter)
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


@pytest.mark.parametrize("axis", CASES)
def test_sharded_modules_fill_modules_of_transformers(
    tmp_path: Path, open_engine: Callable[..., TransferEngine], axis: str
) -> None:
    engine = open_engine("rollout")
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Other(train, rank, str(tmp_path / "store"), axis))
            for rank in range(RANKS)
        ]
        for case in CASES[axis]:
            wanted, _ = (stacked(trainer.hear(180)) for trainer in trainers)
            rollout = transformers.AutoModelForCausalLM.from_config(ROLLOUTS[case.name]())
            with closing(WeightTarget(into=rollout, name="rollout", engine=engine)):
                sync = WeightSync(trainers, ["rollout"], calls=Processes(), digest=True)
                assert sync.push().version == 1
                weights = rollout.state_dict()
                tied = {"lm_head.weight"} if case.name == "qwen3" else set()
                assert weights.keys() - wanted.keys() == tied
                for tensor, value in wanted.items():
                    assert torch.equal(weights[tensor], value), f"{tensor} of {case}"
            for trainer in trainers:
                trainer.say(None)
