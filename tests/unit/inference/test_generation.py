"""Tokens are the same whatever a request shares steps, pages and machines with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.presets import TINY
from fabric_ray.inference.sampling import Sampling
from tests.unit.inference.engines import engine, text

LENGTHS = (3, 17, 33, 40, 64)
REQUESTS = [
    GenerationRequest(
        text(length, seed=length),
        max_tokens=4 + at,
        sampling=Sampling() if at % 2 else Sampling(temperature=0.8, top_p=0.9, seed=at),
    )
    for at, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Each request by itself, in one chunk."""
    return {
        name: [Generator(engine(name, pages=64)).run([request])[0] for request in REQUESTS]
        for name in TINY
    }


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(TINY)),
    tp=st.sampled_from([1, 2, 4]),
    page_tokens=st.integers(3, 20),
    pages=st.integers(30, 60),
    chunk=st.integers(5, 70),
    most=st.integers(1, 5),
    order=st.permutations(range(len(REQUESTS))),
)
def test_tokens_depend_on_nothing_but_the_request(
    alone: dict[str, list[list[int]]],
    name: str,
    tp: int,
    page_tokens: int,
    pages: int,
    chunk: int,
    most: int,
    order: list[int],
) -> None:
    served = engine(name, tp=tp, page_tokens=page_tokens, pages=pages)
    loop = Generator(served, chunk_tokens=chunk, max_running=most)
    found = loop.run([REQUESTS[at] for at in order])
    assert found == [alone[name][at] for at in order]
    assert loop.pools.idle


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mla", "tiny-hybrid"])
def test_a_prefix_that_is_found_changes_no_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(name, page_tokens=4, pages=64)
    loop = Generator(served, chunk_tokens=16)
    prompt = text(50)
    first = loop.run([GenerationRequest(prompt, max_tokens=8)])[0]
    computed = []
    prefill = served.prefill
    monkeypatch.setattr(served, "prefill", lambda c: computed.append(len(c.tokens)) or prefill(c))
    again = loop.run([GenerationRequest(prompt, max_tokens=8)])[0]
    assert again == first
    assert computed == [2]  # all but the first 48
    computed.clear()
    longer = [*prompt, *first[:7], 9, 9]
    found = loop.run([GenerationRequest(longer, max_tokens=5)])[0]
    assert computed == [3]  # what was generated is known too, 56 tokens in all
    fresh = Generator(engine(name)).run([GenerationRequest(longer, max_tokens=5)])[0]
    assert found == fresh
    assert loop.pools.idle


def test_the_last_token_is_in_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that stops never computes the keys of its last token: with it a page isn't full."""
    prompt = text(20)
    free = Generator(engine("tiny-llama")).run([GenerationRequest(prompt, max_tokens=9)])[0]
    last = next(at for at in range(3, 9) if free[at] not in free[:at])
    served = engine("tiny-llama", page_tokens=20 + last + 1, pages=8)
    loop = Generator(served)
    stop = frozenset({free[last]})
    stopped = loop.run([GenerationRequest(prompt, max_tokens=30, stop=stop)])[0]
    assert stopped == free[: last + 1]
    computed: list[int] = []
    prefill = served.prefill
    monkeypatch.setattr(served, "prefill", lambda c: computed.append(len(c.tokens)) or prefill(c))
    longer = [*prompt, *stopped, 9, 9]
    loop.run([GenerationRequest(longer, max_tokens=2)])
    assert computed == [len(longer)]


def test_requests_wait_for_pages_of_others(alone: dict[str, list[list[int]]]) -> None:
    loop = Generator(engine("tiny-llama", page_tokens=8, pages=9))  # as many as the longest needs
    assert loop.run(REQUESTS) == alone["tiny-llama"]
    assert loop.pools.idle


def test_a_stop_token_ends_a_request_and_a_cancel_too() -> None:
    loop = Generator(engine("tiny-llama"))
    prompt = text(12)
    free = loop.run([GenerationRequest(prompt, max_tokens=9)])[0]
    stop = free[4]
    found = loop.run([GenerationRequest(prompt, max_tokens=9, stop=frozenset({stop}))])[0]
    assert found == free[: free.index(stop) + 1]
    kept = loop.submit(GenerationRequest(prompt, max_tokens=9))
    dropped = loop.submit(GenerationRequest(text(30, seed=5), max_tokens=9))
    tokens = [e.token for _ in range(3) for e in loop.step() if e.request == kept]
    loop.cancel(dropped)
    loop.cancel(dropped)
    while loop.busy:
        emitted = loop.step()
        assert {e.request for e in emitted} <= {kept}
        tokens += [e.token for e in emitted]
    assert tokens == free
    assert loop.pools.idle


def test_requests_that_can_never_be_served_are_refused() -> None:
    loop = Generator(engine("tiny-llama", page_tokens=4, pages=3))
    with pytest.raises(InferenceError, match="14 tokens need more pages than the cache has"):
        loop.submit(GenerationRequest(text(10), max_tokens=5))
    with pytest.raises(InferenceError, match="give at least 1 of both"):
        loop.submit(GenerationRequest([], max_tokens=5))
    loop.submit(GenerationRequest([999], max_tokens=2))
    with pytest.raises(InferenceError, match="token 999 isn't in a vocabulary of 258"):
        loop.step()
    assert not loop.busy
    assert loop.pools.idle
