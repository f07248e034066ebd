"""What each engine rank must hold, worked out a second time: straight from full tensors.

This shares nothing with the family tables or the plan algebra, so that a mistake in those can't
hide here. It follows vLLM's and SGLang's parallel layers with torch's own chunk, cat and stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from msgspec import structs
from torch import Tensor

from fabric_ray.models.config import ModelConfig
from fabric_ray.models.kinds import ARCHITECTURES

_VOCAB_MULTIPLE = 64


def expected_containers(
    config: ModelConfig,
    full_tensors: Mapping[str, Tensor],
    *,
    tp: int,
    ep: int = 1,
    dp: int = 1,
    rank: int,
) -> dict[str, Tensor]:
    """All containers of rank ``rank`` (0 to ``dp * tp - 1``) of a replica, by name.

    Args:
        config: the model.
        full_tensors: every parameter whole, under its Hugging Face name; a
            :class:`~fabric_ray.models.checkpoint.Checkpoint` will do.
        tp: ranks that share everything but experts.
        ep: groups of ranks that own whole experts; divides ``dp * tp``.
        dp: groups of ``tp`` ranks in a replica.
        rank: place in the replica.
    """
    return dict(iter_expected(config, full_tensors, tp=tp, ep=ep, dp=dp, rank=rank))


def iter_expected(
    config: ModelConfig,
    full_tensors: Mapping[str, Tensor],
    *,
    tp: int,
    ep: int = 1,
    dp: int = 1,
    rank: int,
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one: only the parameters of one container are held at a time."""
    if config.nest:
        plain = structs.replace(config, nest="")
        parts = iter_expected(plain, _TextModel(full_tensors), tp=tp, ep=ep, dp=dp, rank=rank)
        yield from ((f"language_model.{name}", tensor) for name, tensor in parts)
        return
    get = full_tensors.__getitem__
    among_all, rank = rank, rank % tp
    yield "model.embed_tokens.weight", _vocab_rows(get("model.embed_tokens.weight"), tp, rank)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", get(f"{prefix}{norm}.weight")
        attention = _latent_attention if config.latent else _attention
        yield from attention(config, full_tensors, prefix + "self_attn.", tp, rank)
        for norm in ARCHITECTURES[config.kind].added_norms if config.post_norms else ():
            yield f"{prefix}{norm}.weight", get(f"{prefix}{norm}.weight")
        mlp = prefix + "mlp."
        moe = config.moe
        if moe is None or not config.has_experts(layer):
            dense = _fused_mlp if config.fused_mlp else _mlp
            yield from dense(full_tensors, mlp, tp, rank, bias=config.mlp_bias)
            continue
        router = ["gate.weight"]
        router += ["gate.e_score_correction_bias"] if moe.correction_bias else []
        yield from ((mlp + name, get(mlp + name)) for name in router)
        yield from _experts(full_tensors, mlp, moe.experts, tp * dp // ep, ep, among_all)
        if moe.shared_intermediate and not moe.shared_gate:
            yield from _mlp(full_tensors, mlp + "shared_experts.", tp, rank, bias=False)
        elif moe.shared_intermediate:
            yield from _mlp(full_tensors, mlp + "shared_expert.", tp, rank, bias=False)
            gate = mlp + "shared_expert_gate.weight"
            yield gate, get(gate)
    yield "model.norm.weight", get("model.norm.weight")
    if not config.tied:
        yield "lm_head.weight", _vocab_rows(get("lm_head.weight"), tp, rank)


class _TextModel(Mapping[str, Tensor]):
    """Tensors of a text model by the names that they have outside the model of text and images."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name.replace("model.", "model.language_model.", 1)]

    def __iter__(self) -> Iterator[str]:
        return (name.replace("language_model.", "", 1) for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _vocab_rows(full: Tensor, tp: int, rank: int) -> Tensor:
    missing = -full.shape[0] % _VOCAB_MULTIPLE
    while (full.shape[0] + missing) % tp:
        missing += _VOCAB_MULTIPLE
    padded = torch.cat([full, full.new_zeros(missing, full.shape[1])])
    return padded.chunk(tp)[rank]


def _attention(
    config: ModelConfig, full: Mapping[str, Tensor], prefix: str, tp: int, rank: int
) -> Iterator[tuple[str, Tensor]]:
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        q = full[f"{prefix}q_proj.{kind}"].chunk(tp)[rank]
        k, v = (_kv_heads(config, full[f"{prefix}{n}_proj.{kind}"], tp, rank) for n in "kv")
        yield f"{prefix}qkv_proj.{kind}", torch.cat([q, k, v])
    if config.qk_norm:
        yield f"{prefix}q_norm.weight", full[f"{prefix}q_norm.weight"]
        yield f"{prefix}k_norm.weight", full[f"{prefix}k_norm.weight"]
    o = full[f"{prefix}o_proj.weight"]
    yield f"{prefix}o_proj.weight", o.chunk(tp, dim=1)[rank].contiguous()
    if config.out_bias:
        yield f"{prefix}o_proj.bias", full[f"{prefix}o_proj.bias"]


def _kv_heads(config: ModelConfig, full: Tensor, tp: int, rank: int) -> Tensor:
    """The key or value heads that this rank's query heads look at."""
    heads = full.view(config.kv_heads, config.head_dim, *full.shape[1:])
    queries_per_rank = config.heads // tp
    queries_per_kv = config.heads // config.kv_heads
    first = rank * queries_per_rank // queries_per_kv
    last = (rank * queries_per_rank + queries_per_rank - 1) // queries_per_kv
    return heads[first : last + 1].flatten(0, 1)


def _latent_attention(
    config: ModelConfig, full: Mapping[str, Tensor], prefix: str, tp: int, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values by heads; the latents that they come from on every rank."""
    latents = full[f"{prefix}kv_a_proj_with_mqa.weight"]
    if f"{prefix}q_a_proj.weight" in full:
        fused = torch.cat([full[f"{prefix}q_a_proj.weight"], latents])
        yield f"{prefix}fused_qkv_a_proj_with_mqa.weight", fused
        yield f"{prefix}q_a_layernorm.weight", full[f"{prefix}q_a_layernorm.weight"]
        queries = "q_b_proj.weight"
    else:
        yield f"{prefix}kv_a_proj_with_mqa.weight", latents
        queries = "q_proj.weight"
    yield f"{prefix}kv_a_layernorm.weight", full[f"{prefix}kv_a_layernorm.weight"]
    for name in (queries, "kv_b_proj.weight"):
        by_head = full[prefix + name].view(config.heads, -1, full[prefix + name].shape[1])
        yield prefix + name, by_head.chunk(tp)[rank].flatten(0, 1)
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
        if (indexer := f"{prefix}indexer.{name}") in full:
            yield indexer, full[indexer]
    by_head = full[f"{prefix}o_proj.weight"].view(config.hidden, config.heads, -1)
    yield f"{prefix}o_proj.weight", by_head.chunk(tp, dim=1)[rank].flatten(1, 2).contiguous()


def _mlp(
    full: Mapping[str, Tensor], prefix: str, tp: int, rank: int, *, bias: bool
) -> Iterator[tuple[str, Tensor]]:
    for kind in ("weight", "bias") if bias else ("weight",):
        gate, up = (full[f"{prefix}{name}_proj.{kind}"].chunk(tp)[rank] for name in ("gate", "up"))
        yield f"{prefix}gate_up_proj.{kind}", torch.cat([gate, up])
    down = full[f"{prefix}down_proj.weight"]
    yield f"{prefix}down_proj.weight", down.chunk(tp, dim=1)[rank].contiguous()
    if bias:
        yield f"{prefix}down_proj.bias", full[f"{prefix}down_proj.bias"]


def _fused_mlp(
    full: Mapping[str, Tensor], prefix: str, tp: int, rank: int, *, bias: bool
) -> Iterator[tuple[str, Tensor]]:
    """Gate over up come as one tensor."""
    assert not bias, "a fused MLP has none"
    halves = full[f"{prefix}gate_up_proj.weight"].chunk(2)
    yield f"{prefix}gate_up_proj.weight", torch.cat([half.chunk(tp)[rank] for half in halves])
    down = full[f"{prefix}down_proj.weight"]
    yield f"{prefix}down_proj.weight", down.chunk(tp, dim=1)[rank].contiguous()


def _experts(
    full: Mapping[str, Tensor], prefix: str, experts: int, inner: int, ep: int, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """``inner`` ranks share each expert."""
    owner, share = divmod(rank, inner)
    mine = torch.arange(experts, dtype=torch.int64, device="cpu").tensor_split(ep)[owner].tolist()

    def w13(expert: int) -> Tensor:
        one = f"{prefix}experts.{expert}."
        gate, up = (full[f"{one}{name}_proj.weight"] for name in ("gate", "up"))
        return torch.cat([gate.chunk(inner)[share], up.chunk(inner)[share]])

    def w2(expert: int) -> Tensor:
        return full[f"{prefix}experts.{expert}.down_proj.weight"].chunk(inner, dim=1)[share]

    yield f"{prefix}experts.w13_weight", torch.stack([w13(expert) for expert in mine])
    yield f"{prefix}experts.w2_weight", torch.stack([w2(expert) for expert in mine])
