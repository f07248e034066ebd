"""A model with an engine's own loader, in the manner of vLLM's and SGLang's: whole tensors by
Hugging Face names go, piece by piece, into fused, stacked and padded parameters of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ray.models import ModelConfig
from fabric_ray.weights.families import target_containers

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class LoadingEngine(torch.nn.Module):
    """The parameters of one rank of ``tp``; experts lie on ``ep`` groups."""

    def __init__(self, config: ModelConfig, *, tp: int, ep: int) -> None:
        super().__init__()
        self.config, self.tp, self.ep, self.rank = config, tp, ep, 0
        self.calls = 0
        for spec in target_containers(config, tp=tp, ep=ep, rank=0):
            empty = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            owner, leaf = self._owner(spec.name)
            owner.register_parameter(leaf, torch.nn.Parameter(empty, requires_grad=False))

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        module: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        return module, leaf

    @contextmanager
    def as_rank(self, rollout: int) -> Iterator[None]:
        self.rank = rollout % self.tp
        yield
        self.rank = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        self.calls += 1
        for name, whole in weights:
            if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
                self._load_expert(parameters, found[1], int(found[2]), found[3], whole)
                continue
            *front, module, kind = name.split(".")
            target = ".".join([*front, _FUSED.get(module, module), kind])
            if target in parameters:
                self._load(parameters[target].data, module, whole)
                loaded.add(target)
        return loaded

    def _load(self, data: Tensor, module: str, whole: Tensor) -> None:
        if module in ("embed_tokens", "lm_head"):
            mine = whole[self.rank * len(data) : (self.rank + 1) * len(data)]
            data[: len(mine)].copy_(mine)
            data[len(mine) :].fill_(0)
        elif module in ("q_proj", "k_proj", "v_proj"):
            q, kv = (n * self.config.head_dim // self.tp for n in (self.config.heads, self._kv))
            start, size = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}[module]
            share = self.rank
            if module != "q_proj":
                share = self.rank * self.config.kv_heads // self._kv
            data.narrow(0, start, size).copy_(whole.narrow(0, share * size, size))
        elif module in ("gate_proj", "up_proj"):
            half = len(data) // 2
            start = 0 if module == "gate_proj" else half
            data.narrow(0, start, half).copy_(whole.narrow(0, self.rank * half, half))
        elif module in ("o_proj", "down_proj") and data.dim() == 2:
            columns = data.shape[1]
            data.copy_(whole.narrow(1, self.rank * columns, columns))
        else:
            data.copy_(whole)

    @property
    def _kv(self) -> int:
        return max(self.config.kv_heads, self.tp)

    def _load_expert(
        self, parameters: dict[str, Tensor], prefix: str, expert: int, which: str, whole: Tensor
    ) -> None:
        w13, w2 = (parameters[f"{prefix}.{name}_weight"].data for name in ("w13", "w2"))
        inner = self.tp // self.ep
        group, share = divmod(self.rank, inner)
        local = expert - group * len(w2)
        if not 0 <= local < len(w2):
            return
        if which == "down":
            w2[local].copy_(whole.chunk(inner, dim=1)[share])
        else:
            half = w13.shape[1] // 2
            start = 0 if which == "gate" else half
            w13[local].narrow(0, start, half).copy_(whole.chunk(inner)[share])
