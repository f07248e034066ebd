"""Configurations of small vLLM instances with this project's KV connector."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

LAYERS, HEADS, HEAD, LATENT = 3, 4, 8, 24

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
_DEEPSEEK = {
    **_LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": LATENT - 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": LAYERS,
}


@cache
def model(mla: bool) -> ModelConfig:
    """vLLM's description of a small model, from a configuration as Hugging Face has them."""
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(_DEEPSEEK if mla else _LLAMA))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )


def config(role: str, **options: Any) -> VllmConfig:
    """An instance's configuration.

    Args:
        role: ``kv_producer`` or ``kv_consumer``.
        options: ``tp``, ``pp``, ``mla``, ``block`` (tokens), ``chunk`` (of a step), ``seqs`` (most
            requests that run), ``policy`` for loads that fail, ``hybrid`` (whether its manager of
            several cache groups is on, as it is by default), ``retention`` (tokens between cached
            windows, ``None`` for all of them), ``states`` (vLLM's mode of their cache), ``model``
            and other fields of the connector's configuration.
    """
    states = options.pop("states", None)
    hybrid, retention = options.pop("hybrid", True), options.pop("retention", 0)
    tp, pp, chunk = options.pop("tp", 1), options.pop("pp", 1), options.pop("chunk", 64)
    mla, block = options.pop("mla", False), options.pop("block", 8)
    policy, seqs = options.pop("policy", "fail"), options.pop("seqs", 16)
    extra = {"model": "small", "terms": {"beat": 0.1, "silence": 2.0}, **options}
    made = VllmConfig(
        model_config=copy.deepcopy(model(mla)),
        cache_config=CacheConfig(
            block_size=block,
            enable_prefix_caching=states != "none",
            prefix_cache_retention_interval=retention,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FabricRayConnector",
            kv_connector_module_path="fabric_ray.integrations.vllm_kv",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )
    # Set here: vLLM refuses more ranks than there are GPUs, and several groups without any device.
    made.parallel_config.tensor_parallel_size = tp
    made.parallel_config.pipeline_parallel_size = pp
    made.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    if states is not None:
        # What vLLM sets by the model.
        made.cache_config.mamba_cache_mode = states
        made.cache_config.mamba_block_size = block if states == "align" else 512
    return made
