"""What the bytes of a page depend on beside its prompt: the model as its server computes it, and
the weights that it computes with. Pages of another content would be taken for one's own (RS-1)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ROW = 1 << 15
"""Bytes that are summed as a row."""


def model_content(config: Any, name: str) -> str:
    """Names the contents of pages: ends whose names differ refuse each other.

    Args:
        config: vLLM's ``ModelConfig``, once the model is loaded.
        name: the checkpoint's.
    """
    return "; ".join([name, *_told(config)])


def _told(config: Any) -> Iterator[str]:
    """What a server was told that changes the bytes of the checkpoint's pages."""
    hf = config.hf_config
    if overrides := config.hf_overrides:
        # A function is named: what it does can't be compared.
        if callable(overrides):
            text = overrides.__qualname__
        else:
            text = json.dumps(overrides, sort_keys=True, default=str)
        yield f"hf_overrides={text}"
    # Of requests vLLM's hashes of images tell it.
    if kwargs := getattr(config.multimodal_config, "mm_processor_kwargs", None):
        yield f"mm_processor_kwargs={json.dumps(kwargs, sort_keys=True, default=str)}"
    # A checkpoint that is quantised itself brings its scales along.
    if config.quantization and getattr(hf, "quantization_config", None) is None:
        yield f"quantization={config.quantization}"
    # vLLM rotates all keys by the long factors where one of a sequence could be that long.
    if (original := _original_length(hf.get_text_config())) is not None:
        yield f"max_model_len{'>' if config.max_model_len > original else '<='}{original}"
    # Llama 4's, which vLLM sets by max_model_len.
    if (tuning := getattr(hf, "attn_temperature_tuning", None)) is not None:
        yield f"attn_temperature_tuning={bool(tuning)}"


def _original_length(text: Any) -> int | None:
    """The tokens up to which LongRoPE has short factors."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type", each.get("type")) in ("longrope", "su"):
            given = each.get("original_max_position_embeddings")
            return int(given or text.original_max_position_embeddings)
    return None


class _Weights:
    """The fingerprint of the last update that this process got, or none."""

    def __init__(self) -> None:
        self.fingerprint = ""
        self.updates: list[tuple[Set[str] | None, str]] = []
        """Updates that left something in the weights: what each brought, and its fingerprint."""

    def put(self, brought: Set[str] | None, found: str) -> None:
        """Adds an update, and drops those that it has replaced.

        Args:
            brought: names of its tensors; ``None`` if it left nothing out.
        """
        self.updates = [
            (other, by)
            for other, by in self.updates
            if brought is not None and (other is None or not other <= brought)
        ]
        self.updates.append((brought, found))
        self.fingerprint = " over ".join(by for _, by in reversed(self.updates))


_weights = _Weights()


def weights() -> str:
    """Which weights this process computes with: equal where the same update was loaded, and empty
    before the first. Only updates by fabric-ray's back end are known."""
    return _weights.fingerprint


class WeightsUpdate:
    """Takes the fingerprint of an update, by its name or tensor by tensor, in any order.

    From the first tensor to :meth:`finish` the weights are like no other process's.

    Args:
        brought: names of what it brings, the same at all processes that get it, if it may leave
            layers out: those keep what earlier updates gave them.
    """

    def __init__(self, *, brought: Set[str] | None = None) -> None:
        self._brought = brought
        self._sum = 0
        self._began = False

    def begin(self, version: str = "") -> None:
        """Weights change from here on.

        Args:
            version: names the update at all processes that get it, where no process has whole
                tensors to :meth:`add`, or the user names it; given once.
        """
        if not self._began:
            self._began = True
            _weights.put(self._brought, f"unfinished {secrets.token_hex(8)}")
        named = hashlib.blake2b(version.encode(), digest_size=16).digest()
        self._sum += int.from_bytes(named, "little") if version else 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """
        Args:
            tensor: in memory of the host, of any shape and dtype.
        """
        import torch

        self.begin()
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = len(data) // _ROW * _ROW
        words = data[:whole].view(torch.int64).view(-1, _ROW // 8)
        # Sums at the speed of memory; no one forges a version of their own weights. By rows and by
        # columns, so that words which change places change them.
        found = hashlib.blake2b(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        for part in (words.sum(0), words.sum(1), data[whole:]):
            found.update(part.view(torch.uint8).numpy().tobytes())
        self._sum += int.from_bytes(found.digest()[:16], "little")

    def finish(self) -> None:
        """All of the update is in use."""
        if self._began:
            _weights.put(self._brought, f"{self._sum % (1 << 128):032x}")
