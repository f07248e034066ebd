"""Between text and tokens: bytes where a model has no tokenizer, Hugging Face's where it has."""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.presets import BYTE_VOCAB

TOKENIZER_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "tekken.json")
"""Files of SentencePiece, of BPE and of Mistral's tokenizers."""

_UNFINISHED = "\ufffd"
"""What tokens decode to that end within a character."""


class TextStream(Protocol):
    """Text of one request as its tokens come."""

    def push(self, token: int) -> str:
        """The text that is certain now and wasn't before; empty within a character."""

    def end(self) -> str:
        """What is left."""


class Tokenizer(Protocol):
    """One model's text."""

    @property
    def vocab(self) -> int:
        """Tokens that it may give."""

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end a text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a prompt.

        Args:
            text: of the prompt.
            special: whether to add the special tokens that the model expects around a text, such as
                its begin; a chat template has them already.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def stream(self) -> TextStream:
        """For one request's tokens."""


class ByteTokenizer:
    """A token for each byte of UTF-8, one for the begin of a text and one for its end."""

    vocab = BYTE_VOCAB
    begin = 256
    stop = frozenset({257})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [*([self.begin] if special else []), *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]) if token < 256 else b"")

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """The ``tokenizer.json`` of a checkpoint, by the ``tokenizers`` package.

    Raises:
        InferenceError: the package isn't there, or the file is damaged.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory) / TOKENIZER_FILE
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise InferenceError(
                f"{path} needs the tokenizers package; install it: pip install tokenizers"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise InferenceError(f"{path} can't be read ({error}); restore it") from error
        # The file may have those of its training; transformers doesn't apply them to prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop = _stop_tokens(Path(directory))
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(token for token, added_token in added if added_token.special)
        """Tokens without text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> TextStream:
        return _HuggingFaceStream(self)


class _HuggingFaceStream:
    """Decodes the last certain tokens again with each new one: a token's text may depend on its
    neighbour's, a space before a word for example."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._certain: list[int] = []
        self._open: list[int] = []

    def push(self, token: int) -> str:
        if token in self._tokenizer.special:
            return ""  # The neighbours of the next token are those before this one.
        self._open.append(token)
        text = self._new()
        if text.endswith(_UNFINISHED):
            return ""
        self._certain, self._open = self._open, []
        return text

    def end(self) -> str:
        text = self._new()
        self._certain, self._open = self._open, []
        return text

    def _new(self) -> str:
        before = self._tokenizer.decode(self._certain)
        return self._tokenizer.decode(self._certain + self._open)[len(before) :]


def load_tokenizer(directory: Path | str | None, *, vocab: int | None) -> Tokenizer:
    """The tokenizer in a checkpoint's directory; bytes where there is no directory or none in it.

    Args:
        directory: of the checkpoint.
        vocab: the model's; it must have every token that the tokenizer gives. ``None`` if it isn't
            known.

    Raises:
        InferenceError: the tokenizer can't be read, isn't the model's, or is in other files.
    """
    if directory is not None and (Path(directory) / TOKENIZER_FILE).exists():
        found: Tokenizer = HuggingFaceTokenizer(directory)
    else:
        _refuse_other_tokenizers(directory)
        found = ByteTokenizer()
    if vocab is not None and found.vocab > vocab:
        raise InferenceError(
            f"the tokenizer gives {found.vocab} tokens and the model has {vocab}; put the model's "
            f"own {TOKENIZER_FILE} into its directory"
        )
    return found


def _refuse_other_tokenizers(directory: Path | str | None) -> None:
    """Bytes would be other tokens than those of the model."""
    for name in _OTHER_FILES:
        if directory is not None and (path := Path(directory) / name).exists():
            raise InferenceError(
                f"{path} can't be read; put the model's {TOKENIZER_FILE} beside it, which "
                "transformers writes: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )


def _stop_tokens(directory: Path) -> frozenset[int]:
    """``eos_token_id``, a number or several, of the first file that has it."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        try:
            found = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        except (ValueError, AttributeError) as error:
            raise InferenceError(f"{path} is no JSON object ({error}); restore it") from error
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
