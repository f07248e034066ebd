"""What an engine refuses, it refuses before it has written anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.errors import InferenceError, InvalidTable, InvalidTokens
from fabric_ray.inference.protocols import NO_PAGE, DecodeRow, PrefillChunk, TailLayout
from tests.unit.inference.engines import engine

GOOD = [0, 1, 2]


def refused(
    served: TorchEngine, error: type[InferenceError], words: str, call: Callable[[], object]
) -> None:
    with pytest.raises(error, match=words):
        call()
    assert not any(buffer.any() for buffer in served.buffers(0))


@pytest.mark.parametrize(
    ("error", "words", "chunk"),
    [
        (InvalidTokens, "at least one token", PrefillChunk([], 0, (GOOD,))),
        (InvalidTokens, "token 258 isn't in a vocabulary", PrefillChunk([1, 258], 0, (GOOD,))),
        (InvalidTokens, "token -1 isn't in a vocabulary", PrefillChunk([-1, 2], 0, (GOOD,))),
        (InvalidTokens, "positions -1 to 0", PrefillChunk([1, 2], -1, (GOOD,))),
        (InvalidTokens, "out of range", PrefillChunk([1], 1 << 24, (GOOD,))),
        (InvalidTable, "0 page tables .* 1 groups", PrefillChunk([1], 0, ())),
        (InvalidTable, "2 page tables .* 1 groups", PrefillChunk([1], 0, (GOOD, GOOD))),
        (InvalidTable, "3 pages of 4 .* position 12 needs 4", PrefillChunk([1], 12, (GOOD,))),
        (InvalidTable, "page 8 .* use 0 to 7", PrefillChunk([1], 0, ([8],))),
        (InvalidTable, f"page {NO_PAGE}", PrefillChunk([1], 5, ([NO_PAGE, 1],))),
        (InvalidTable, "page -1", PrefillChunk([1], 5, ([-1, 1],))),
    ],
)
def test_chunks(error: type[InferenceError], words: str, chunk: PrefillChunk) -> None:
    served = engine("tiny-llama", page_tokens=4, pages=8)
    refused(served, error, words, lambda: served.prefill(chunk))


def test_a_table_that_names_a_page_twice() -> None:
    served = engine("tiny-llama", page_tokens=4, pages=8)
    chunk = PrefillChunk(list(range(8)), 0, ([3, 3],))
    refused(served, InvalidTable, "page 3 .* twice", lambda: served.prefill(chunk))


def test_rows_that_write_to_one_page() -> None:
    served = engine("tiny-llama", page_tokens=4, pages=8)
    rows = [DecodeRow(1, 4, ([0, 1],)), DecodeRow(1, 5, ([0, 1],))]
    refused(served, InvalidTable, "two requests would write to page 1", lambda: served.decode(rows))
    shared = [DecodeRow(1, 4, ([0, 1],)), DecodeRow(1, 5, ([0, 2],))]
    assert served.decode(shared).shape == (2, 258)


def test_a_step_without_rows() -> None:
    served = engine("tiny-llama")
    refused(served, InvalidTokens, "at least one row", lambda: served.decode([]))


def test_a_tail_that_does_not_fit() -> None:
    served = engine("tiny-llama")
    short = torch.zeros(served.tail.nbytes - 1, dtype=torch.uint8)
    with pytest.raises(InferenceError, match=f"a tail takes {served.tail.nbytes} bytes"):
        served.read_tail(short)
    with pytest.raises(InferenceError, match="give uint8"):
        served.read_tail(torch.zeros(served.tail.nbytes))


def test_a_tail_lies_as_its_layout_says() -> None:
    served = engine("tiny-llama")
    tail = served.prefill(PrefillChunk([1, 2, 3], 0, ([5],)))
    assert tail is not None
    into = torch.zeros(served.tail.nbytes + 8, dtype=torch.uint8)
    served.write_tail(tail, into)
    assert not into[served.tail.nbytes :].any()
    numbers = into.view(torch.float64)
    assert torch.equal(numbers[:258], tail.logits)
    assert torch.equal(numbers[258 : 258 + 64], tail.hidden)
    torch.testing.assert_close(served.model.module.logits(tail.hidden), tail.logits)
    # The hidden state begins at a multiple of 8 bytes.
    odd = TailLayout(vocab=259, hidden=3, dtype="bfloat16", itemsize=2)
    assert (odd.hidden_at, odd.nbytes) == (520, 528)
