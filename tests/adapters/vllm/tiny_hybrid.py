"""Writes a tiny random model: ``python tiny_hybrid.py FOLDER SEED KIND``.

Kinds are ``gemma3`` and ``gpt_oss``, with windows of :data:`WINDOW` tokens, ``qwen3_moe``, and
``qwen3_next``, with states (gated delta nets) beside attention.
As with ``examples/serve_llm/tiny_model.py``, greedy outputs depend on every token of the prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

WINDOW = 64
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2048, 8, 4, 32
LOCAL, GLOBAL = "sliding_attention", "full_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = [LOCAL, LOCAL, LOCAL, GLOBAL] * 2
    config = Gemma3TextConfig(
        **_COMMON,
        intermediate_size=2 * HEADS * HEAD_DIM,
        num_hidden_layers=len(layers),
        layer_types=layers,
        query_pre_attn_scalar=HEAD_DIM,
    )
    return Gemma3ForCausalLM(config)


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    layers = [LOCAL, GLOBAL] * 3
    config = GptOssConfig(
        **_COMMON,
        intermediate_size=HEADS * HEAD_DIM,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 2048,
        },
    )
    return GptOssForCausalLM(config)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**_COMMON, "sliding_window": None},
        intermediate_size=HEADS * HEAD_DIM,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **{**_COMMON, "sliding_window": None},
        intermediate_size=HEADS * HEAD_DIM,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=8,
        full_attention_interval=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return Qwen3NextForCausalLM(config)


KINDS = {
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}


def write(folder: Path, seed: int, kind: str) -> None:
    """Saves the checkpoint and its tokenizer in a folder."""
    import torch

    from examples.serve_llm.tiny_model import write_tokenizer

    torch.manual_seed(seed)
    model = KINDS[kind]().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(0, 1.0)
            elif "A_log" in name:
                parameter.fill_(-8.0)  # States forget slowly.
            elif "embed" in name:
                # Gemma's are multiplied by the root of the width.
                parameter.normal_(0, _COMMON["hidden_size"] ** -0.5 if kind == "gemma3" else 1.0)
            elif "bias" not in name and parameter.ndim >= 2:
                parameter.normal_(0, 1.6 / parameter.shape[1] ** 0.5)
            elif "q_norm" in name or "k_norm" in name or "post_attention" in name:
                parameter.fill_(1.0)  # Added to 1. Attention is neither even nor to one token.
    model.save_pretrained(folder)
    write_tokenizer(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
