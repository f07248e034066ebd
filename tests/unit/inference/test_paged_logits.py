"""Paged logits are those of full attention, however the request is cut and wherever it lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import TINY, tiny
from fabric_ray.inference.protocols import NO_PAGE, DecodeRow, PrefillChunk
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools
from tests.examples import examples
from tests.unit.inference.engines import (
    engine,
    followed,
    prefill,
    shuffled,
    step,
    text,
    unpaged,
    weights,
)
from tests.unit.models.small_models import LATENT, SMALL, waves

EXACT = {"atol": 1e-9, "rtol": 0.0}
MODELS = TINY | SMALL | LATENT


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_whole_rows(name: str) -> None:
    config = MODELS[name]
    model = Model.of(config, waves(config), tp=2, dtype="float64", revision="waves")
    tokens = text(61, vocab=config.vocab)
    served = TorchEngine(model, CacheSpec(page_tokens=7, pages=32))
    found = followed(served, tokens, 50, chunk=13)
    torch.testing.assert_close(found, unpaged(model, tokens)[49:], **EXACT)


@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(sorted(TINY)),
    tp=st.sampled_from([1, 2, 4]),
    page_tokens=st.integers(1, 40),
    order=st.sampled_from(["heads_first", "tokens_first", "heads_outermost"]),
    buffers=st.sampled_from(["one", "split", "per_layer"]),
    prompt=st.integers(1, 40),
    chunk=st.integers(1, 41),
    seed=st.integers(0, 9),
)
def test_logits_do_not_depend_on_pages_orders_or_chunks(
    name: str,
    tp: int,
    page_tokens: int,
    order: str,
    buffers: str,
    prompt: int,
    chunk: int,
    seed: int,
) -> None:
    tokens = text(prompt + 3)
    other = engine(name, tp=tp, page_tokens=page_tokens, pages=64, order=order, buffers=buffers)
    found = followed(other, tokens, prompt, chunk=chunk, seed=seed)
    torch.testing.assert_close(found, followed(engine(name), tokens, prompt), **EXACT)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mla", "tiny-hybrid"])
def test_a_batch_gives_each_row_what_it_gets_alone(name: str) -> None:
    served = engine(name, page_tokens=5, pages=128)
    lengths = [1, 4, 5, 6, 23, 24, 25, 48, 90]
    free = iter(range(128))
    rows, alone = [], []
    for seed, length in enumerate(lengths):
        tokens = text(length + 1, seed=seed)
        pages = [next(free) for _ in range(-(-(length + 1) // 5))]
        tables = tuple(pages for _ in served.layout(0).groups)
        prefill(served, tokens[:length], tables)
        rows.append(DecodeRow(tokens[length], length, tables))
        apart = engine(name)
        own = shuffled(apart, length + 1)
        prefill(apart, tokens[:length], own)
        alone.append(step(apart, tokens[length], length, own))
    torch.testing.assert_close(served.decode(rows), torch.stack(alone), **EXACT)
    torch.testing.assert_close(served.decode(rows[::-1]), torch.stack(alone[::-1]), **EXACT)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mla", "tiny-hybrid"])
def test_what_lies_in_unused_places_does_not_matter(name: str) -> None:
    """Places where no token was written, or that a window has passed, hold no numbers here."""
    rows: list[DecodeRow] = []
    served = engine(name, page_tokens=8, pages=32)
    for buffer in served.buffers(0):
        buffer.view(torch.float64).fill_(torch.nan)
    expected = []
    for number, length in enumerate((35, 36, 42)):
        tokens = text(length + 1, seed=number)
        tables = tuple(list(range(8 * number, 8 * number + 6)) for _ in served.layout(0).groups)
        prefill(served, tokens[:length], tables, chunk=9)
        rows.append(DecodeRow(tokens[length], length, tables))
        expected.append(followed(engine(name), tokens, length)[-1])
        for layer in tiny(name).windowed_layers:
            for view in served._cache.views(0, layer):
                passed = length - 24 + 1
                view[8 * number : 8 * number + passed // 8] = torch.nan
                view[8 * number + passed // 8, :, : passed % 8] = torch.nan
    torch.testing.assert_close(served.decode(rows), torch.stack(expected), **EXACT)


def test_pages_before_the_window_may_be_gone() -> None:
    tokens = text(70)
    expected = followed(engine("tiny-hybrid", page_tokens=4), tokens, 60, chunk=10)
    served = engine("tiny-hybrid", page_tokens=4, window_pages=30)
    pools = CachePools(served.layout(0).groups)
    tables = pools.open(tokens, 70)
    out = []
    for start in range(0, 60, 10):
        tables.slide(start)
        chunk = PrefillChunk(tokens[start : start + 10], start, tables.tables, last=start == 50)
        tail = served.prefill(chunk)
    assert tail is not None
    out.append(tail.logits)
    for position in range(60, 70):
        tables.slide(position)
        out.append(served.decode([DecodeRow(tokens[position], position, tables.tables)])[0])
    torch.testing.assert_close(torch.stack(out), expected, atol=1e-9, rtol=0)
    gone = tables.tables[1].count(NO_PAGE)
    assert gone == (69 - 24 + 1) // 4
    assert pools.pools[1].owned_pages == 18 - gone


def test_layers_are_announced_once_their_pages_are_written() -> None:
    served = engine("tiny-hybrid", tp=2)
    tokens = text(20)
    tables = shuffled(served, 20)
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for rank in range(2):
            for after in range(4):
                for view in served._cache.views(rank, after):
                    assert bool(view.any()) == (after <= layer), (rank, after, layer)

    served.prefill(PrefillChunk(tokens, 0, tables), on_layer)
    assert seen == [0, 1, 2, 3]


def test_what_a_layer_callback_raises_ends_the_prefill() -> None:
    served = engine("tiny-llama")

    def cancel(layer: int) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.prefill(PrefillChunk(text(9), 0, shuffled(served, 9)), cancel)


def test_pages_may_come_from_another_engine() -> None:
    tokens = text(33)
    one, other = engine("tiny-qwen3", tp=2), engine("tiny-qwen3", tp=2)
    tables = shuffled(one, 33)
    tail = prefill(one, tokens[:30], tables)
    for rank in range(2):
        for mine, theirs in zip(one.buffers(rank), other.buffers(rank), strict=True):
            theirs.copy_(mine)
    bytes_ = torch.empty(one.tail.nbytes, dtype=torch.uint8)
    one.write_tail(tail, bytes_)
    arrived = other.read_tail(bytes_)
    assert torch.equal(arrived.logits, tail.logits)
    assert torch.equal(arrived.hidden, tail.hidden)
    for position in range(30, 33):
        expected = step(one, tokens[position], position, tables)
        assert torch.equal(step(other, tokens[position], position, tables), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_come_close(dtype: str) -> None:
    tokens = text(40)
    narrow = TorchEngine(Model.random(tiny("qwen3"), tp=2, dtype=dtype))  # type: ignore[arg-type]
    found = followed(narrow, tokens, 30, chunk=7).double()
    assert narrow.layout(0).groups[0].tensors[0].dtype == dtype
    expected = followed(engine("tiny-qwen3"), tokens, 30)
    bound = {"float32": 1e-4, "bfloat16": 0.3}[dtype]
    assert (found - expected).abs().max().item() < bound


def test_fingerprints_tell_models_apart_and_not_ranks() -> None:
    base = weights("tiny-llama").fingerprint
    assert weights("tiny-llama", 2).fingerprint == base
    config = tiny("llama")
    others = [
        Model.random(config, seed=1, dtype="float64"),
        Model.random(config, dtype="float32"),
        Model.random(tiny("qwen3"), dtype="float64"),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 4
