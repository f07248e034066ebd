"""A token follows from logits, seed and index."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.sampling import Sampling, sample


def logits(*odds: float) -> Tensor:
    return torch.tensor(odds, dtype=torch.float64).log()


def drawn(values: Tensor, sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    counts = Counter(sample(values, sampling, index) for index in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_without_temperature_the_likeliest_is_taken_and_the_first_of_equals() -> None:
    assert sample(logits(1, 5, 3), Sampling(), 0) == 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        equal = torch.ones(1000, dtype=dtype)
        equal[500:] = 2
        assert sample(equal, Sampling(), 7) == 500


def test_tokens_are_as_frequent_as_likely() -> None:
    found = drawn(logits(1, 0, 2, 7), Sampling(temperature=1))
    assert found == {
        0: pytest.approx(0.1, abs=0.02),
        2: pytest.approx(0.2, abs=0.02),
        3: pytest.approx(0.7, abs=0.02),
    }


def test_temperature_flattens() -> None:
    found = drawn(logits(1, 9), Sampling(temperature=2))
    assert found[0] == pytest.approx(0.25, abs=0.02)


def test_top_p_draws_from_the_fewest_likeliest_that_suffice() -> None:
    values = logits(2, 5, 1, 2)
    assert drawn(values, Sampling(temperature=1, top_p=0.5)) == {1: 1.0}
    found = drawn(values, Sampling(temperature=1, top_p=0.6))
    assert found == {0: pytest.approx(2 / 7, abs=0.02), 1: pytest.approx(5 / 7, abs=0.02)}
    assert set(drawn(values, Sampling(temperature=1, top_p=0.91))) == {0, 1, 2, 3}
    assert drawn(values, Sampling(temperature=1, top_p=1e-9)) == {1: 1.0}


def test_draws_are_those_of_every_machine() -> None:
    # Recorded: another token here is another token than a peer's.
    values = torch.arange(50, dtype=torch.float32) / 10
    found = [sample(values, Sampling(temperature=1, seed=3), index) for index in range(8)]
    nucleus = Sampling(temperature=1, top_p=0.8, seed=3)
    assert found == [29, 46, 49, 48, 39, 25, 40, 40]
    found_of_nucleus = [sample(values, nucleus, index) for index in range(8)]
    assert found_of_nucleus == [48, 41, 34, 39, 46, 49, 46, 46]
    other = [sample(values, Sampling(temperature=1, seed=4), index) for index in range(8)]
    assert found != other


def test_what_is_no_number_gives_no_token() -> None:
    for wrong in ([0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2):
        for sampling in (Sampling(), Sampling(temperature=1)):
            with pytest.raises(InferenceError, match="not finite"):
                sample(torch.tensor(wrong), sampling, 0)
    with pytest.raises(InferenceError, match="temperature is -1; give 0 to 100"):
        Sampling(temperature=-1)
    with pytest.raises(InferenceError, match=r"top_p is 0; give more than 0"):
        Sampling(top_p=0)
    for fields in ({"top_k": -1}, {"min_p": -0.1}, {"min_p": 1.1}):
        with pytest.raises(InferenceError, match=next(iter(fields))):
            Sampling(**fields)


def test_top_k_draws_from_so_many_of_the_likeliest() -> None:
    values = logits(2, 5, 1, 2)
    found = drawn(values, Sampling(temperature=1, top_k=2))
    assert found == {0: pytest.approx(2 / 7, abs=0.02), 1: pytest.approx(5 / 7, abs=0.02)}
    assert set(drawn(values, Sampling(temperature=1, top_k=9))) == {0, 1, 2, 3}
    # top_p is a share of what top_k leaves: 5 of 7, not 5 of 10.
    assert set(drawn(values, Sampling(temperature=1, top_k=2, top_p=0.7))) == {1}


def test_min_p_leaves_out_what_is_unlikely_beside_the_likeliest() -> None:
    values = logits(2, 5, 1, 4)
    assert set(drawn(values, Sampling(temperature=1, min_p=0.5))) == {1, 3}
    assert set(drawn(values, Sampling(temperature=1, min_p=1))) == {1}
    assert set(drawn(values, Sampling(temperature=2, min_p=0.6))) == {0, 1, 3}


def test_barred_tokens_are_not_chosen() -> None:
    values = logits(2, 5, 1, 2)
    before = values.clone()
    assert sample(values, Sampling(), 0, barred=frozenset({1, 99})) == 0
    drawn_tokens = {
        sample(values, Sampling(temperature=1), index, barred={1, 3}) for index in range(99)
    }
    assert drawn_tokens == {0, 2}
    assert torch.equal(values, before)
