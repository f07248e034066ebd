"""A model that is trained on ranks, in either mode, goes where it goes in one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fabric_ray.models import ModelConfig
from fabric_ray.models.boxes import InitialWeights, load_parameters
from fabric_ray.models.config import Moe
from fabric_ray.models.transformer import Mlp, Transformer
from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.layer import ParallelExperts
from tests.moe_ranks import ThreadComm, on_ranks, rank_of

RANKS, STEPS, RATE, LENGTH = 4, 3, 0.05, 5
MOE = Moe(experts=8, top_k=3, intermediate=24, shared_intermediate=16)
CONFIG = ModelConfig(
    "qwen2_moe", vocab=24, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48,
    qkv_bias=True, moe=MOE, dtype="float32",
)  # fmt: skip
SEQUENCES = torch.arange(RANKS * LENGTH).view(RANKS, LENGTH)


def model(exchange: Differentiable | None = None) -> Transformer:
    made = Transformer(CONFIG)
    if exchange is not None:
        for block in made.model.layers:
            block.mlp.experts = ParallelExperts(
                exchange, lambda _: Mlp(CONFIG.hidden, MOE.intermediate, torch.float32),
                max_tokens=LENGTH,
            )  # fmt: skip
    load_parameters(made, InitialWeights(CONFIG, seed=4, std=0.2))
    return made


def loss_of(made: nn.Module, sequences: Tensor) -> Tensor:
    """The sum over tokens but each sequence's first, of how unlikely they were."""
    logits = made(sequences)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, sequences[:, 1:].flatten(), reduction="sum")


def step(made: nn.Module) -> None:
    for p in made.parameters():
        assert p.grad is not None
        p.data -= RATE * p.grad
        p.grad = None


def trained() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the model in one place."""
    made, losses = model(), []
    for _ in range(STEPS):
        loss = loss_of(made, SEQUENCES)
        loss.backward()
        losses.append(loss.item())
        step(made)
    return losses, dict(made.named_parameters())


@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_a_model_is_trained_as_in_one_place(per_node: int | None) -> None:
    losses, wanted = trained()
    assert losses[-1] < 0.9 * losses[0]
    gathered: dict[str, list[Tensor]] = {}

    def work(comm: ThreadComm) -> list[float]:
        exchange = rank_of(
            Differentiable, comm, experts=MOE.experts, topk=MOE.top_k, hidden=CONFIG.hidden,
            max_tokens=LENGTH, dtype=torch.float32, ranks_per_node=per_node, chunk=4,
        )  # fmt: skip
        made, said = model(exchange), []
        for turn in range(STEPS):
            loss = loss_of(made, SEQUENCES[comm.rank()][None])
            loss.backward()
            exchange.check()
            said.append(loss.item())
            for name, p in made.named_parameters():
                assert p.grad is not None
                gathered.setdefault(f"{turn}.{name}", []).append(p.grad)
            comm.all_gather(b"")
            for name, p in made.named_parameters():
                if "experts." not in name:
                    p.grad = torch.stack(gathered[f"{turn}.{name}"]).sum(0)
            comm.all_gather(b"")
            step(made)
        for name, p in made.named_parameters():
            torch.testing.assert_close(p, wanted[name], rtol=1e-4, atol=1e-5)
        return said

    of_ranks = on_ranks(RANKS, work)
    assert [sum(of_turn) for of_turn in zip(*of_ranks, strict=True)] == pytest.approx(
        losses, rel=1e-5
    )
