"""Fills tiny vLLM models by their recorded loaders, and compares them with models that loaded the
same checkpoint: ``python recorded_models.py FOLDER RANKS [--expert-parallel] KIND...``.

It runs under the Python of the servers. For each kind it prints a line of JSON: by rank, which
tensors differ, which come whole, how many elements a worker needs, and which tensors differ after a
reload of whole tensors.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY, HIDDEN, HEADS, HEAD_DIM = 130, 64, 4, 16
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # no multiple of 64: rows are padded
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
# Of a model when it is made. Trainers that send parameters alone don't send them.
_CONSTANTS = ("inv_freq", ".beta", ".eps")
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}


def dtype_of(kind: str) -> torch.dtype:
    # Kernels of latent attention for AMX take no other.
    return torch.bfloat16 if kind.startswith("deepseek") else torch.float32


def configuration(kind: str) -> Any:
    import transformers as hf

    if kind == "llama":
        return hf.LlamaConfig(**_COMMON)
    if kind == "tied":
        return hf.LlamaConfig(**{**_COMMON, "tie_word_embeddings": True})
    if kind == "qwen3":
        return hf.Qwen3Config(**_COMMON)
    if kind == "apertus":
        return hf.ApertusConfig(**_COMMON)
    if kind == "qwen3_moe":
        return hf.Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_experts=4)
    if kind == "deepseek_v2":
        return hf.DeepseekV2Config(**_LATENT)
    if kind == "deepseek_v3":
        return hf.DeepseekV3Config(**{**_LATENT, "q_lora_rank": 32}, topk_method="noaux_tc")
    if kind == "gemma3":
        return hf.Gemma3TextConfig(
            **_COMMON,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=HEAD_DIM,
        )
    assert kind == "gpt_oss", kind
    return hf.GptOssConfig(
        **{**_COMMON, "intermediate_size": 64},  # kernels take multiples of 32 on each rank
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )


def checkpoint(folder: Path, kind: str, seed: int) -> Path:
    """Writes a model whose tensors are all random."""
    from transformers import AutoModelForCausalLM

    at = folder / f"{kind}-{seed}"
    if not at.exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration(kind), dtype=dtype_of(kind))
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if not name.endswith(_CONSTANTS):
                    tensor.normal_()
        model.save_pretrained(at)
    return at


def sent(at: Path) -> dict[str, torch.Tensor]:
    """What a trainer sends of a checkpoint."""
    from safetensors.torch import load_file

    tensors = load_file(at / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_CONSTANTS)}


def load(at: Path, ranks: int, experts: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model that vLLM loads, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(
        model=str(at),
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        enable_expert_parallel=experts,
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=True,
        max_model_len=128,
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        connect(ranks)
        return get_model(vllm_config=config), config


def connect(ranks: int) -> None:
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    parallel_state.init_distributed_environment(
        ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel(ranks)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a model computes with, also what its layers have derived."""
    found = {}
    for path, layer in model.named_modules():
        packed = vars(layer.impl) if hasattr(layer, "impl") else {}
        own = {**layer._parameters, **layer._buffers, **vars(layer), **packed}
        found |= {
            f"{path}.{name}": value
            for name, value in own.items()
            if isinstance(value, torch.Tensor) and "cache" not in name
        }
        # Weights that are packed for a kernel are seen by what it computes with them.
        linear = getattr(layer, "cpu_linear", None)
        # Attention may have packed the weight of a plain one, which is among its tensors then.
        if linear and (linear is not torch.nn.functional.linear or layer.weight.numel()):
            widths = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(size for name in widths if (size := getattr(layer, name, None)))
            ones = torch.eye(width, dtype=layer.weight.dtype)
            found[f"{path}()"] = linear(ones, layer.weight, None)
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None):
            found[f"{path}()"] = experts_output(layer)
    return found


def experts_output(layer: Any) -> torch.Tensor:
    """What a layer of experts computes, each of them for some rows."""
    rows, count = (
        torch.eye(layer.hidden_size, dtype=layer.w13_weight.dtype),
        layer.local_num_experts,
    )
    ids = torch.arange(2 * len(rows), dtype=torch.int32).view(-1, 2) % count
    weights = torch.linspace(0.1, 0.9, ids.numel()).view(ids.shape)
    output: torch.Tensor = layer.quant_method.apply(layer, rows, weights, ids, None, None)
    return output


def compare(folder: Path, kind: str, ranks: int, experts: bool) -> dict[str, Any]:
    """Fills a model of other weights by its recorded loader."""
    from vllm.config import set_current_vllm_config

    from fabric_ray.integrations.vllm_recorded import record_model
    from fabric_ray.integrations.vllm_reload import Reload
    from fabric_ray.plan import DType, Tensor

    old, new = (folder / f"{kind}-{seed}" for seed in (1, 2))
    model, config = load(old, ranks, experts, dtype_of(kind))
    expected, _ = load(new, ranks, experts, dtype_of(kind))
    arrived = sent(new)
    tensors = {
        name: Tensor(name, tuple(t.shape), DType.of(str(t.dtype).removeprefix("torch.")))
        for name, t in arrived.items()
    }
    before = {name: t.clone() for name, t in tensors_of(model).items()}
    with set_current_vllm_config(config):
        recorded = record_model(model, config.model_config, tensors, ())
        same = tensors_of(model)
        assert same.keys() == before.keys()
        assert all(equal(same[name], t) for name, t in before.items()), "recording changes nothing"
        boxes = {
            need.container: arrived[need.tensor][
                tuple(slice(at, at + size) for at, size in need.box)
            ].contiguous()
            for need in recorded.needs
        }
        reload = Reload(model, config.model_config)
        recorded.apply(reload, boxes)
        reload.finish()
        got = tensors_of(model)
        answer = {
            "wrong": differing(got, tensors_of(expected)),
            "changed": len(differing(got, before)),
            "whole": recorded.whole,
            "elements": sum(box.numel() for box in boxes.values()),
            "of": sum(t.numel() for t in arrived.values()),
        }
        return answer | {"streamed": stream(model, config.model_config, old, before)}


def stream(
    model: torch.nn.Module, config: Any, at: Path, expected: dict[str, torch.Tensor]
) -> list[str] | str:
    """Reloads whole tensors; what differs then, or the error."""
    from fabric_ray.errors import Unsupported
    from fabric_ray.integrations.vllm_recorded import refuse_lost
    from fabric_ray.integrations.vllm_reload import Reload

    tensors = sent(at)
    told = [(name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()]
    try:
        refuse_lost(model, config, told)
    except Unsupported as error:
        return str(error)
    reload = Reload(model, config)
    for name, tensor in tensors.items():
        reload.load([(name, tensor)])
    reload.finish()
    return differing(tensors_of(model), expected)


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors of which bits differ."""
    assert a.keys() == b.keys()
    return sorted(name for name in a if not equal(a[name], b[name]))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are equal: memory that no loader fills may hold NaN."""
    same_shape = a.shape == b.shape and a.dtype == b.dtype
    return same_shape and torch.equal(
        *(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    )


def run(rank: int, folder: str, ranks: int, experts: bool, kinds: list[str], port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ["VLLM_DIST_IDENT"] = f"recorded_{port}"  # of vLLM's memory between its ranks
    torch.set_num_threads(1)
    found = {}
    for kind in kinds:
        found[kind] = compare(Path(folder), kind, ranks, experts)
        print(rank, kind, found[kind], file=sys.stderr, flush=True)
    Path(folder, f"answer-{rank}").write_text(json.dumps(found))


def main(folder: str, ranks: int, experts: bool, kinds: list[str]) -> None:
    for kind in kinds:
        for seed in (1, 2):
            checkpoint(Path(folder), kind, seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (folder, ranks, experts, kinds, port), nprocs=ranks)
    answers = [json.loads(Path(folder, f"answer-{rank}").read_text()) for rank in range(ranks)]
    print(json.dumps(answers))


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--expert-parallel"]
    main(arguments[0], int(arguments[1]), "--expert-parallel" in sys.argv, arguments[2:])
