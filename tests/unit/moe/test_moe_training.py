"""A model that is trained on ranks, in either mode, goes where it goes in one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.layer import MoeConfig
from fabric_ray.moe.model import MoeModel, MoeModelConfig
from tests.moe_ranks import ThreadComm, on_ranks, rank_of

RANKS, STEPS, RATE, M = 4, 3, 0.02, 8
CONFIG = MoeModelConfig(
    moe=MoeConfig(hidden=32, experts=8, topk=3, intermediate=24, shared_intermediate=16),
    vocab=24,
    positions=16,
)
SEQUENCES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16, 17], [18, 19, 20]]


def loss_of(model: MoeModel, sequences: list[list[int]], rounds: int) -> Tensor:
    """The sum over tokens but each sequence's first, of how unlikely they were."""
    logits = model.forward(sequences, rounds=rounds)
    total = torch.zeros(())
    for rows, tokens in zip(logits, sequences, strict=True):
        wanted = torch.tensor(tokens[1:])
        total = total + torch.nn.functional.cross_entropy(rows[:-1], wanted, reduction="sum")
    return total


def trained() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the model in one place."""
    model = MoeModel(CONFIG, seed=4, deterministic=False)
    parameters = {name: p.requires_grad_() for name, p in model.parameters().items()}
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, SEQUENCES, 1)
        loss.backward()
        losses.append(loss.item())
        step(parameters)
    return losses, {name: p.detach() for name, p in parameters.items()}


def step(parameters: dict[str, Tensor]) -> None:
    for p in parameters.values():
        assert p.grad is not None
        p.data -= RATE * p.grad
        p.grad = None


@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_a_model_is_trained_as_in_one_place(per_node: int | None) -> None:
    losses, wanted = trained()
    assert losses[-1] < 0.9 * losses[0]
    gathered: dict[str, list[Tensor]] = {}

    def work(comm: ThreadComm) -> list[float]:
        exchange = rank_of(
            Differentiable, comm, experts=CONFIG.moe.experts, topk=CONFIG.moe.topk,
            hidden=CONFIG.moe.hidden, max_tokens=M, dtype=torch.float32, ranks_per_node=per_node,
            chunk=4,
        )  # fmt: skip
        model = MoeModel(CONFIG, seed=4, exchange=exchange, max_tokens=M, deterministic=False)
        parameters = {name: p.requires_grad_() for name, p in model.parameters().items()}
        said = []
        for turn in range(STEPS):
            loss = loss_of(model, SEQUENCES[comm.rank() :: RANKS], 2)
            loss.backward()
            exchange.check()
            said.append(loss.item())
            for name, p in parameters.items():
                assert p.grad is not None
                gathered.setdefault(f"{turn}.{name}", []).append(p.grad)
            comm.all_gather(b"")
            for name, p in parameters.items():
                if "experts" not in name:
                    p.grad = torch.stack(gathered[f"{turn}.{name}"]).sum(0)
            comm.all_gather(b"")
            step(parameters)
        each = CONFIG.moe.experts // RANKS
        here = slice(comm.rank() * each, (comm.rank() + 1) * each)
        for name, p in parameters.items():
            want = wanted[name][here] if "experts" in name else wanted[name]
            torch.testing.assert_close(p.detach(), want, rtol=1e-4, atol=1e-5)
        return said

    of_ranks = on_ranks(RANKS, work)
    assert [sum(of_turn) for of_turn in zip(*of_ranks, strict=True)] == pytest.approx(
        losses, rel=1e-5
    )
