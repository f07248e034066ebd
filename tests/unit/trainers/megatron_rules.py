"""What a rank of a Megatron-Core trainer holds, cut from full tensors by torch alone.

This shares nothing with the tables or the plan algebra; ranks are numbered by shapes of ``arange``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fabric_ray.models import ModelConfig


class Sizes(NamedTuple):
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    pp_last: bool = True
    """Whether stages are numbered last (``tp-cp-ep-dp-pp``) or before replicas."""

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank is along every axis."""
        edp = self.world // (self.pp * self.ep * self.etp)
        ranks = torch.arange(self.world)
        if self.pp_last:
            dense = ranks.view(self.pp, self.dp, self.cp, self.tp)
            expert = ranks.view(self.pp, edp, self.ep, self.etp)
        else:
            dense = ranks.view(self.dp, self.pp, self.cp, self.tp).transpose(0, 1)
            expert = ranks.view(edp, self.pp, self.ep, self.etp).transpose(0, 1)
        pp, _, _, tp = (dense == rank).nonzero()[0].tolist()
        stage, _, ep, etp = (expert == rank).nonzero()[0].tolist()
        assert stage == pp, "experts have the same stages"
        return {"pp": pp, "tp": tp, "ep": ep, "etp": etp}


class Rank:
    """One rank of a trainer of ``sizes`` whose stages hold ``stages`` layers, in model order."""

    def __init__(
        self,
        config: ModelConfig,
        full: Mapping[str, Tensor],
        sizes: Sizes,
        rank: int,
        *,
        stages: list[int],
        te: bool,
        grouped: bool,
        vocab_multiple: int,
    ) -> None:
        self.c, self.full, self.sizes = config, full, sizes
        self.at = sizes.place(rank)
        self.stages, self.te, self.grouped = stages, te, grouped
        self.vocab_multiple = vocab_multiple

    def tensors(self) -> dict[str, Tensor]:
        out = {}
        for part in range(self.sizes.vpp):
            prefix = f"model{part}." if self.sizes.vpp > 1 else ""
            out |= {prefix + name: t.contiguous() for name, t in self._part(part)}
        return out

    def _part(self, part: int) -> Iterator[tuple[str, Tensor]]:
        index = part * self.sizes.pp + self.at["pp"]
        first, last = index == 0, index == len(self.stages) - 1
        if first:
            yield "embedding.word_embeddings.weight", self._vocab("model.embed_tokens.weight")
        layers = torch.arange(self.c.layers).split(self.stages)[index].tolist()
        for number, layer in enumerate(layers):
            for name, tensor in self._layer(layer, f"model.layers.{layer}."):
                yield f"decoder.layers.{number}.{name}", tensor
        if last:
            yield "decoder.final_layernorm.weight", self.full["model.norm.weight"]
        if last and not (first and self.c.tied):
            table = "model.embed_tokens.weight" if self.c.tied else "lm_head.weight"
            yield "output_layer.weight", self._vocab(table)

    def _layer(self, layer: int, hf: str) -> Iterator[tuple[str, Tensor]]:
        moe = self.c.has_experts(layer)
        fuses = self.te and self.c.latent is None
        norm = "self_attention.linear_qkv.layer_norm_weight" if fuses else "input_layernorm.weight"
        yield norm, self.full[f"{hf}input_layernorm.weight"]
        attention = self._latent_attention if self.c.latent else self._attention
        for name, tensor in attention(f"{hf}self_attn."):
            yield f"self_attention.{name}", tensor
        for norm in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
            if hf + norm in self.full:
                yield norm, self.full[hf + norm]
        fuses = self.te and not moe
        norm = "mlp.linear_fc1.layer_norm_weight" if fuses else "pre_mlp_layernorm.weight"
        yield norm, self.full[f"{hf}post_attention_layernorm.weight"]
        for name, tensor in self._experts(f"{hf}mlp.") if moe else self._mlp(f"{hf}mlp."):
            yield f"mlp.{name}", tensor

    def _attention(self, hf: str) -> Iterator[tuple[str, Tensor]]:
        for kind in ("weight", "bias"):
            if f"{hf}q_proj.{kind}" in self.full:
                yield f"linear_qkv.{kind}", self._qkv(hf, kind)
        for x in "qk":
            if self.c.qk_norm:
                yield f"{x}_layernorm.weight", self.full[f"{hf}{x}_norm.weight"]
        yield "linear_proj.weight", self._columns(f"{hf}o_proj.weight")
        if self.c.out_bias:
            yield "linear_proj.bias", self.full[f"{hf}o_proj.bias"]

    def _qkv(self, hf: str, kind: str) -> Tensor:
        """Query groups behind each other: a group's queries, its key, its value."""
        groups = [self.full[f"{hf}{x}_proj.{kind}"] for x in "qkv"]
        by_group = [t.view(self.c.kv_heads, -1, *t.shape[1:]) for t in groups]
        return torch.cat(by_group, dim=1).flatten(0, 1).chunk(self.sizes.tp)[self.at["tp"]]

    def _latent_attention(self, hf: str) -> Iterator[tuple[str, Tensor]]:
        if f"{hf}q_a_proj.weight" in self.full:
            yield from self._latent(hf, "q", "q_a_proj", "q_a_layernorm", "q_b_proj")
        else:
            yield "linear_q_proj.weight", self._rows(f"{hf}q_proj.weight")
        yield from self._latent(hf, "kv", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        yield "linear_proj.weight", self._columns(f"{hf}o_proj.weight")
        if f"{hf}indexer.wk.weight" in self.full:
            for linear in ("wq_b", "wk", "weights_proj"):
                whole = self.full[f"{hf}indexer.{linear}.weight"]
                yield f"core_attention.indexer.linear_{linear}.weight", whole
            for kind in ("weight", "bias"):
                name = f"indexer.k_norm.{kind}"
                yield f"core_attention.{name}", self.full[hf + name]

    def _latent(
        self, hf: str, x: str, down: str, norm: str, up: str
    ) -> Iterator[tuple[str, Tensor]]:
        whole = self.full[f"{hf}{down}.weight"]
        yield f"linear_{x}_down_proj.weight", whole if self.te else self._rows(f"{hf}{down}.weight")
        name = f"linear_{x}_up_proj.layer_norm_weight" if self.te else f"{x}_layernorm.weight"
        yield name, self.full[f"{hf}{norm}.weight"]
        yield f"linear_{x}_up_proj.weight", self._rows(f"{hf}{up}.weight")

    def _mlp(self, hf: str) -> Iterator[tuple[str, Tensor]]:
        for kind in ("weight", "bias"):
            if f"{hf}gate_proj.{kind}" in self.full:
                halves = [self._rows(f"{hf}{x}_proj.{kind}") for x in ("gate", "up")]
                yield f"linear_fc1.{kind}", torch.cat(halves)
        if f"{hf}gate_up_proj.weight" in self.full:
            halves = self.full[f"{hf}gate_up_proj.weight"].chunk(2)
            shares = [half.chunk(self.sizes.tp)[self.at["tp"]] for half in halves]
            yield "linear_fc1.weight", torch.cat(shares)
        yield "linear_fc2.weight", self._columns(f"{hf}down_proj.weight")
        if f"{hf}down_proj.bias" in self.full:
            yield "linear_fc2.bias", self.full[f"{hf}down_proj.bias"]

    def _experts(self, hf: str) -> Iterator[tuple[str, Tensor]]:
        yield "router.weight", self.full[f"{hf}gate.weight"]
        if f"{hf}gate.e_score_correction_bias" in self.full:
            yield "router.expert_bias", self.full[f"{hf}gate.e_score_correction_bias"]
        assert self.c.moe is not None
        ways, share = self.sizes.etp, self.at["etp"]
        mine = torch.arange(self.c.moe.experts).chunk(self.sizes.ep)[self.at["ep"]].tolist()
        for number, expert in enumerate(mine):
            one = f"{hf}experts.{expert}."
            gate, up, down = (self.full[f"{one}{x}_proj.weight"] for x in ("gate", "up", "down"))
            fc1 = torch.cat([gate.chunk(ways)[share], up.chunk(ways)[share]])
            fc2 = down.chunk(ways, dim=1)[share]
            for name, tensor in (("linear_fc1", fc1), ("linear_fc2", fc2)):
                if self.grouped:
                    yield f"experts.{name}.weight{number}", tensor
                else:
                    yield f"experts.local_experts.{number}.{name}.weight", tensor
        for shared in ("shared_expert.", "shared_experts."):
            if f"{hf}{shared}down_proj.weight" in self.full:
                for name, tensor in self._mlp(hf + shared):
                    yield f"shared_experts.{name}", tensor
        if f"{hf}shared_expert_gate.weight" in self.full:
            yield "shared_experts.gate_weight", self.full[f"{hf}shared_expert_gate.weight"]

    def _rows(self, name: str) -> Tensor:
        return self.full[name].chunk(self.sizes.tp)[self.at["tp"]]

    def _columns(self, name: str) -> Tensor:
        return self.full[name].chunk(self.sizes.tp, dim=1)[self.at["tp"]]

    def _vocab(self, name: str) -> Tensor:
        """Padded with what must not arrive."""
        table = self.full[name]
        missing = -table.shape[0] % (self.vocab_multiple * self.sizes.tp)
        padded = torch.cat([table, table.new_full((missing, table.shape[1]), float("nan"))])
        return padded.chunk(self.sizes.tp)[self.at["tp"]]
