"""The words of a family table: which parameters make a container, and how ranks share it.

Patterns are Hugging Face names in which ``{layer}`` and ``{expert}`` stand for a number.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["heads", "kv_heads", "column"]
"""What is never cut in two: an attention head, a key/value head, a single row or column."""


class Whole(msgspec.Struct, frozen=True):
    """Every rank holds all of it."""


class Split(msgspec.Struct, frozen=True):
    """Equal shares along a dimension, the first rank the first share.

    Key/value heads are fewer than ranks at times: then each head is held by as many neighbouring
    ranks as it takes.
    """

    dim: int
    unit: Unit = "column"


class Vocab(msgspec.Struct, frozen=True):
    """Equal shares of the rows, behind which zeros are added until there is a multiple of
    ``multiple`` that the ranks can share."""

    multiple: int = 64


Cut = Whole | Split | Vocab


class Part(msgspec.Struct, frozen=True):
    """One parameter's place in a container."""

    parameter: str
    """Pattern of its name."""
    cut: Cut


class Rule(msgspec.Struct, frozen=True):
    """A container of the engine, and the parameters it is made of.

    Several parts lie behind each other along dimension 0. Where parts name an ``{expert}``, the
    container stacks the experts that a rank owns along a new first dimension. A rule applies
    wherever all its parameters exist; where only some do, the model is refused.
    """

    container: str
    """Pattern of its name."""
    parts: tuple[Part, ...]

    @property
    def stacked(self) -> bool:
        return any("{expert}" in part.parameter for part in self.parts)


class Family(msgspec.Struct, frozen=True):
    """How inference engines lay out the models of one architecture."""

    name: str
    rules: tuple[Rule, ...]
