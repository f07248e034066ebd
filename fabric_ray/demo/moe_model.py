"""The model of the demo of expert parallelism: the reference model, with each row's bits alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fabric_ray.inference.presets import tiny
from fabric_ray.models.boxes import InitialWeights, load_parameters
from fabric_ray.models.config import ModelConfig, Moe
from fabric_ray.models.transformer import Experts, Mlp, Transformer
from fabric_ray.moe import AllToAll
from fabric_ray.moe.layer import ParallelExperts

SEQUENCE = 16
"""Tokens of the longest sequence."""
EXPERTS = 4
"""Of each rank."""


def model(ranks: int) -> ModelConfig:
    """A small Qwen3-MoE with four experts for each rank."""
    experts = Moe(experts=EXPERTS * ranks, top_k=3, intermediate=32)
    return replace(tiny("tiny-qwen3-moe"), layers=2, moe=experts)


def exchange_sizes(config: ModelConfig) -> dict[str, Any]:
    """Arguments of the exchange of such a model."""
    assert config.moe is not None, "the demo's model has experts"
    return {
        "experts": config.moe.experts,
        "topk": config.moe.top_k,
        "hidden": config.hidden,
        "max_tokens": SEQUENCE,
        "dtype": torch.float32,
        "answer_dtype": torch.float32,
    }


class RowMlp(Mlp):
    """An expert that reads one row after the other: a matrix product of many rows has other bits
    than that of each."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:0], *(Mlp.forward(self, row[None]) for row in x)])


class OnePlace(Experts):
    """All experts, summed up as an exchange does: in float32, in the order of a token's experts."""

    left_out: tuple[int, ...] = ()
    """Experts that answer nothing; other weights stay as they are."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        sums = torch.zeros_like(tokens)
        for token, experts in enumerate(chosen.tolist()):
            for place, number in enumerate(experts):
                if number not in self.left_out:
                    answer = self[number](tokens[token, None])[0]
                    sums[token] += weights[token, place] * answer
        return sums


class Reader:
    """The model on a rank of an exchange, or in one place without one."""

    def __init__(self, config: ModelConfig, seed: int, exchange: AllToAll | None = None) -> None:
        assert config.moe is not None, "the demo's model has experts"
        width, count = config.moe.intermediate, config.moe.experts
        # A product's bits may depend on threads.
        torch.set_num_threads(1)

        def make(number: int) -> RowMlp:
            return RowMlp(config.hidden, width, torch.float32)

        with torch.device("meta"):
            self._model = Transformer(config)
            for block in self._blocks:
                if exchange is None:
                    block.mlp.experts = OnePlace(map(make, range(count)))
                else:
                    block.mlp.experts = ParallelExperts(
                        exchange, make, max_tokens=SEQUENCE, shrink=True
                    )
        load_parameters(self._model, InitialWeights(config, seed=seed, std=0.2))

    @property
    def _blocks(self) -> Iterable[Any]:
        return self._model.model.layers

    @torch.no_grad()
    def __call__(self, sequence: list[int] | None, left_out: tuple[int, ...] = ()) -> Tensor:
        """Logits ``[tokens, vocab]``; for ``None`` it takes part in exchanges, and returns none."""
        for block in self._blocks:
            if isinstance(block.mlp.experts, OnePlace):
                block.mlp.experts.left_out = left_out
        tokens = torch.tensor([sequence or []], dtype=torch.int64, device="cpu")
        logits: Tensor = self._model(tokens)[0]
        return logits


def rank_model(config: ModelConfig, seed: int, exchange: AllToAll) -> Reader:
    """What :class:`ExpertGroup` makes on each rank."""
    return Reader(config, seed, exchange)
