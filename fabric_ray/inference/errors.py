"""What is refused by an inference engine and its pages."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class InferenceError(FabricError, ValueError):
    """A request to an engine or a pool that can't be carried out; nothing was changed."""


class InvalidSpec(InferenceError):
    """A cache that can't be laid out as described. ``field`` where it is one."""


class InvalidTokens(InferenceError):
    """Tokens or positions that the model doesn't have."""


class InvalidTable(InferenceError):
    """A page table that is too short, or that names pages which don't exist. ``group``."""


class NonFiniteLogits(InferenceError):
    """Logits from which no token can be chosen: the weights or the pages are damaged."""


class OutOfPages(InferenceError):
    """There are fewer free pages than asked for; none was taken.

    ``needed`` and ``free`` are numbers of pages of ``group``.
    """

    needed: int
    free: int
    group: str


class PageMisuse(InferenceError):
    """A page was freed or held by a caller that doesn't own it. ``page`` names it."""
