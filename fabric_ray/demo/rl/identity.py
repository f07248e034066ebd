"""Fingerprints of weights: equal exactly if all bits are."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

Fingerprints = dict[str, str]
"""By the name of a container, its shape and dtype among what is hashed."""


def fingerprints(named: Iterable[tuple[str, Tensor]]) -> Fingerprints:
    """128 bits of BLAKE2b of each tensor."""
    return {name: _fingerprint(tensor) for name, tensor in named}


def differing(found: Fingerprints, expected: Fingerprints) -> tuple[str, ...]:
    """Containers that differ, are missing or are too many."""
    names = sorted(found.keys() | expected.keys())
    return tuple(name for name in names if found.get(name) != expected.get(name))


def _fingerprint(tensor: Tensor) -> str:
    digest = blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
