"""A transformer whose experts are on ranks says what it says in one place."""

from __future__ import annotations

import random

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe.layer import MoeConfig
from fabric_ray.moe.model import MoeModel, MoeModelConfig
from tests.unit.moe.moe_ranks import exchanges, together

MOE = MoeConfig(hidden=32, experts=8, topk=2, intermediate=16, shared_intermediate=16)
SMALL = MoeModelConfig(moe=MOE, vocab=64, positions=48)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(64) for _ in range(draw.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_tokens_are_those_of_one_place(ranks: int, dtype: str) -> None:
    moe = MoeConfig(**{**{f: getattr(MOE, f) for f in MOE.__struct_fields__}, "dtype": dtype})
    config = MoeModelConfig(moe=moe, vocab=64, positions=48)
    asked = prompts(5)
    whole = MoeModel(config, seed=1)
    logits, tokens = whole.forward(asked), whole.generate(asked, 6)
    with exchanges(moe, ranks, max_tokens=16) as alls:
        models = [MoeModel(config, seed=1, exchange=a, max_tokens=16) for a in alls]
        mine = [asked[r::ranks] for r in range(ranks)]
        found = together([lambda r=r: models[r].forward(mine[r], rounds=3) for r in range(ranks)])
        said = together(
            [lambda r=r: models[r].generate(mine[r], 6, rounds=4) for r in range(ranks)]
        )
    for r in range(ranks):
        assert said[r] == tokens[r::ranks]
        for one, other in zip(found[r], logits[r::ranks], strict=True):
            assert torch.equal(one, other)


def test_a_sequence_has_the_same_bits_alone_and_as_it_grows() -> None:
    model = MoeModel(SMALL, seed=2)
    asked = prompts(4, seed=3)
    for prompt, logits in zip(asked, model.forward(asked), strict=True):
        assert torch.equal(model.forward([prompt])[0], logits)
        grown = [model.forward([prompt[: n + 1]], last=True)[0] for n in range(len(prompt))]
        assert torch.equal(torch.cat(grown), logits)


def test_what_is_said_depends_on_weights_and_on_all_that_was_read() -> None:
    prompt = prompts(1)[0] + [1, 2, 3]
    model = MoeModel(SMALL, seed=0)
    said = model.forward([prompt])[0][-1]
    assert not torch.equal(said, MoeModel(SMALL, seed=1).forward([prompt])[0][-1])
    assert not torch.equal(said, model.forward([[(prompt[0] + 1) % 64, *prompt[1:]]])[0][-1])
    assert not torch.equal(said, model.forward([prompt], left_out=range(6))[0][-1])


def test_the_fast_model_is_close() -> None:
    asked = prompts(3)
    fast = MoeModel(SMALL, seed=0, deterministic=False).forward(asked)
    for one, other in zip(fast, MoeModel(SMALL, seed=0).forward(asked), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_what_can_not_be_read_is_refused() -> None:
    model = MoeModel(SMALL)
    for asked, words in [([[]], "no tokens"), ([[64]], "token 64"), ([[0] * 49], "shorten it")]:
        with pytest.raises(errors.InvalidArgument, match=words):
            model.forward(asked)
    with pytest.raises(errors.InvalidArgument, match="shorten it"):
        model.generate([[0] * 40], 10)
    with pytest.raises(errors.InvalidArgument, match="max_tokens"):
        model.generate([[0]], 0)
    for options, words in [({"kv_heads": 3}, "multiple of kv_heads"), ({"layers": 0}, "layers")]:
        with pytest.raises(errors.InvalidArgument, match=words):
            MoeModelConfig(**options)  # type: ignore[arg-type]
    assert model.forward([]) == []
