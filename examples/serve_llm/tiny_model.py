"""Writes a tiny random Llama with a word-level tokenizer: ``python tiny_model.py FOLDER SEED``.

Weights are scaled so that greedy outputs depend on every token of the prompt: equal outputs then
show equal caches.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 2048
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 32


def write(folder: Path, seed: int) -> None:
    """Saves the checkpoint and its tokenizer in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=2 * HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else 1.6 / parameter.shape[1] ** 0.5
                parameter.normal_(0, scale)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Saves a tokenizer of words `w4`, `w5`, ... in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
