"""Text survives tokens, and streams come out as the whole does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

TEXTS = ["", "plain words, then more", "größer 🦀 世界\n\0", "a  b", "🦀"]


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(token) for token in tokens) + stream.end()


@given(st.text())
def test_any_text_is_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab for token in tokens)
    assert tokens[0] == 256
    assert tokenizer.decode(tokens) == text
    assert streamed(tokenizer, tokens) == text


@given(st.lists(st.integers(0, 257)))
def test_any_bytes_are_text_streamed_or_not(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)


def test_a_character_comes_when_its_last_byte_does() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "é!".encode()] == ["", "é", "!"]


def test_without_a_file_tokens_are_bytes(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(None, vocab=258), ByteTokenizer)
    assert isinstance(load_tokenizer(tmp_path, vocab=300), ByteTokenizer)
    with pytest.raises(InferenceError, match="gives 258 tokens and the model has 97"):
        load_tokenizer(None, vocab=97)


@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_tokenizer_that_cannot_be_read_is_not_replaced_by_bytes(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(InferenceError, match=f"{file} can't be read; put the model's tokenizer.j"):
        load_tokenizer(tmp_path, vocab=32000)


def test_a_file_is_not_ignored_for_want_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InferenceError, match="install it: pip install tokenizers"):
        load_tokenizer(tmp_path, vocab=1000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["plain words, then more and more words"] * 4, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_the_file_of_a_checkpoint_is_used(directory: Path, text: str) -> None:
    tokenizer = load_tokenizer(directory, vocab=300)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert streamed(tokenizer, tokens) == text
    assert tokenizer.stop == {1, 5}
    assert len(tokenizer.encode("plain words")) < len("plain words")


def test_a_prompt_is_neither_cut_nor_padded(directory: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = str(directory / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(path)
    tokens = made.encode(TEXTS[1]).ids
    for change, fields in (("truncation", {"max_length": 3}), ("padding", {"length": 64})):
        getattr(made, f"enable_{change}")(**fields)
        made.save(path)
        assert load_tokenizer(directory, vocab=300).encode(TEXTS[1]) == tokens
        made.no_truncation()


def test_a_special_token_does_not_take_the_space_after_it(tmp_path: Path) -> None:
    """Llama 2's decoder drops the space that a text begins with."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders, vocab = tokenizers.decoders, {"\u2581one": 0, "\u2581two": 1, "</s>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "</s>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, vocab=3)
    for tokens in ([0, 2, 1], [2, 0, 2, 2, 1]):
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens) == "one two"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InferenceError, match="restore it"):
        load_tokenizer(tmp_path, vocab=1000)
