"""The transformer computes what Hugging Face's does, and learns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fabric_ray.models import ModelConfig, demo_config, parameter_shapes
from fabric_ray.models.boxes import InitialWeights, load_parameters
from fabric_ray.models.fsdp import copy_task, make_optimizer, train_step
from fabric_ray.models.transformer import Transformer
from tests.unit.models.small_models import LATENT, SMALL, some_tokens, waves

MODELS = SMALL | LATENT

# Hugging Face transformers 5.23, float32, weights and tokens as in small_models: logits of ids
# 0, 1, 2, 50 and 96 at the last position of the second row.
RECORDED = {
    "llama": [-0.2633, 0.3346, -0.3507, -0.2280, -0.2392],
    "llama-3.1": [0.7155, -0.1644, -1.0315, -2.9529, -3.1604],
    "qwen2": [0.2260, 0.3522, -0.8723, -1.4122, -1.4026],
    "qwen3": [-1.1964, 0.6935, -0.0762, 1.0434, 0.9927],
    "qwen3-windowed": [-0.6524, -0.4629, -0.2476, -0.9731, -0.0068],
    "qwen3_moe": [-0.1171, 0.9040, 1.0768, 0.2222, 0.4577],
    "qwen2_moe": [-2.1743, 2.8638, -3.0813, -2.1364, -2.2287],
    "mla": [-0.2596, -0.1641, 0.0854, -0.2573, 0.2379],
    "mla-lite": [0.1820, -0.4248, -0.2550, 0.4779, 0.3338],
    "mla-moe": [0.1972, -0.4958, -0.2397, -0.3173, -0.5283],
    "mla-yarn": [-0.4267, -0.1570, 0.2600, -0.3839, 0.4314],
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def filled(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    load_parameters(model, InitialWeights(config))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_the_config(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(MODELS[name])
    found = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert found == parameter_shapes(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_hugging_face(name: str) -> None:
    config = MODELS[name]
    model = Transformer(config)
    model.load_state_dict(waves(config))
    with torch.no_grad():
        logits = model(some_tokens(config))
    assert logits.shape == (2, 33, config.vocab)
    found = logits[1, -1, [0, 1, 2, 50, 96]]
    torch.testing.assert_close(found, torch.tensor(RECORDED[name]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_few_steps_lower_the_loss_of_a_copy_task(kind: str) -> None:
    config = demo_config(parameters=3e5, kind=kind)  # type: ignore[arg-type]
    model = filled(config)
    assert config.dtype == "bfloat16"
    optimizer = make_optimizer(model, lr=0.5)
    batch = copy_task(config.vocab, batch=4, half=8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(batch[:, :8], batch[:, 8:])
    losses = [train_step(model, optimizer, batch) for _ in range(8)]
    assert losses[0] == pytest.approx(torch.tensor(config.vocab).log().item(), abs=0.5)
    assert losses[-1] < losses[0] - 0.5


def test_the_optimizer_keeps_nothing_beside_the_parameters() -> None:
    config = demo_config(parameters=3e5)
    model = filled(config)
    optimizer = make_optimizer(model)
    train_step(model, optimizer, some_tokens(config, positions=8))
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert not any(isinstance(value, torch.Tensor) for value in kept)


def test_every_parameter_gets_a_gradient_even_of_idle_experts() -> None:
    config = SMALL["qwen3_moe"]
    model = Transformer(config)
    model.load_state_dict(waves(config))
    model(some_tokens(config, batch=1, positions=1)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    config = demo_config(parameters=3e5)
    one, same, other = (InitialWeights(config, seed=s) for s in (1, 1, 2))
    name = "model.embed_tokens.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one["lm_head.weight"])
    box = (slice(60, 131), slice(3, 9))
    assert torch.equal(one.box(name, box), one[name][box])
    assert one[name].float().std().item() == pytest.approx(0.02, rel=0.05)
