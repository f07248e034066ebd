"""vLLM's, SGLang's and Megatron-Core's code over ``deep_ep``, on ranks of a gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.adapters.moe_callers import CALLERS, serve
from tests.processes import Other


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks}-ranks")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Other]]:
    store = str(tmp_path_factory.mktemp("group") / "store")
    with ExitStack() as stack:
        found = [
            stack.enter_context(Other(serve, rank, request.param, store))
            for rank in range(request.param)
        ]
        # Where a rank can't start, the others wait for it in vain.
        assert [other.hear(120) for other in found] == ["here"] * request.param
        yield found
        for other in found:
            other.say(None)


@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_gets_the_sums_of_one_place(ranks: list[Other], caller: str) -> None:
    for other in ranks:
        other.say(caller)
    assert [other.hear(240) for other in ranks] == ["passed"] * len(ranks)
